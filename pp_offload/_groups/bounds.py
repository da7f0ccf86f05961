"""The least memory at which compute does not wait for copies, and what of it has room.

Pure functions of options, and of the times of a step in which nothing waits, in seconds from any
begin. If the link is slower than compute, compute waits whatever is chosen, and these bounds keep
the link busy.

    in_flight_bytes([TimedBytes(0.01, 2**28), TimedBytes(0.02, 2**28)], 50e9)  # of one forward
    window_bytes([TimedBytes(0.03, 2**27, 2**27)], 50e9)  # of one backward

NOTE [ A chunk at a time ]
    In the steady state of a pipeline every forward is followed by a backward, in which what the
    forward left on the way to the host has time to arrive; and every backward by a forward, in
    which the window is filled. So a chunk's own bytes say what it needs, and many forwards in a row
    ask for no more than one: with them the link falls behind whatever the cap, until all memory is
    taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pp_offload._core.bound import refill_below
from pp_offload.config import AUTO, OffloadConfig

PRECISION = 64
"""A window is found to one part in so many of all its bytes."""

SHARE_OF_UNUSED = 0.8
"""How much of the device's unused memory bounds may grow into: an allocator leaves gaps."""


class TimedBytes(NamedTuple):
    """When compute had made bytes that leave, or asked for bytes that came back."""

    at_s: float

    nbytes: int
    """Bytes that leave, or that are asked for the first time."""

    freed: int = 0
    """Bytes that are asked for the last time; several saved tensors may share them."""


def in_flight_bytes(offloads: Sequence[TimedBytes], bytes_per_s: float) -> int:
    """What is on its way to the host at most if compute never waits, the newest group included.

    Args:
        offloads: Of one chunk's forward, in order.
        bytes_per_s: Of the link.
    """
    under_way: deque[TimedBytes] = deque()
    now = most = 0
    free_s = 0.0
    for at_s, nbytes, _ in offloads:
        while under_way and under_way[0].at_s <= at_s:
            now -= under_way.popleft().nbytes
        now += nbytes
        most = max(most, now)
        free_s = max(free_s, at_s) + nbytes / bytes_per_s
        under_way.append(TimedBytes(free_s, nbytes))
    return most


def window_bytes(uses: Sequence[TimedBytes], bytes_per_s: float) -> int:
    """The smallest window, nearly, that is always ahead of the uses.

    Args:
        uses: Of one chunk's backward, in order. The window is full when they begin.
        bytes_per_s: Of the link.
    """
    low, high = 0, sum([use.nbytes for use in uses])
    step = max(1, high // PRECISION)
    while high - low > step:
        middle = (low + high) // 2
        if is_in_time(uses, middle, bytes_per_s):
            high = middle
        else:
            low = middle
    return high


def is_in_time(uses: Sequence[TimedBytes], window: int, bytes_per_s: float) -> bool:
    """Whether no use waits, where reloads run ahead by ``window`` bytes, as the prefetcher's do."""
    sizes = [use.nbytes for use in uses if use.nbytes]
    there_s: list[float] = []
    num_used = unused = 0
    free_s = asked_at_s = float("-inf")
    for at_s, nbytes, freed in uses:
        if not there_s or unused <= refill_below(window):
            for more in sizes[len(there_s) :]:
                if unused and unused + more > window:
                    break
                free_s = max(free_s, asked_at_s) + more / bytes_per_s
                there_s.append(free_s)
                unused += more
        if nbytes:
            if num_used >= len(there_s) or there_s[num_used] > at_s:
                return False
            num_used += 1
        unused -= freed
        asked_at_s = at_s
    return True


def is_wanted(config: OffloadConfig) -> bool:
    """Whether there is something to choose. With a disk, the times of copies do not say enough."""
    has_auto = AUTO in (config.max_in_flight_bytes, config.prefetch_bytes)
    return has_auto and config.tiers == ("host",)


def grown(now: Sequence[int], wanted: Sequence[int], room: int) -> list[int]:
    """Each bound, where together they grow by ``room`` bytes at most.

    A bound that shrinks makes no room for another: the two need not be full at the same time.
    """
    more = [max(0, new - old) for old, new in zip(now, wanted, strict=True)]
    total, room = sum(more), max(0, room)
    if total > room:
        more = [nbytes * room // total for nbytes in more]
    return [min(new, old + add) for old, new, add in zip(now, wanted, more, strict=True)]


def within(
    config: OffloadConfig, now: tuple[int, int], least: tuple[int, int], unused_bytes: int | None
) -> tuple[int, int]:
    """These bounds, as far as the device has room.

    Args:
        config: Says which of the two are chosen.
        now: The bounds as they are.
        least: The least at which compute does not wait.
        unused_bytes: Of the device; None where it has no end.
    """
    wanted = [
        least[0] * (config.max_in_flight_bytes == AUTO),
        least[1] * (config.prefetch_bytes == AUTO),
    ]
    if unused_bytes is not None:
        wanted = grown(now, wanted, int(unused_bytes * SHARE_OF_UNUSED))
    return max(1, wanted[0]), wanted[1]  # 0 in flight: compute would wait for each copy
