"""Which bounds of both directions keep the step with the least memory, and whether defaults do.

A larger bound never costs time and never saves memory. So of the pairs that are fast enough only
those on the edge can be the best, and the search follows that edge:

    caps   *  *  +          + fast enough, asked
           -  +  +          - too slow, asked
           .  -  -          . not asked
              windows

    best = least_peak(caps, windows, run)   # run(cap, window) -> Found
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

MAX_RATIO = 1.01
"""Of the step to that without offload, where the link is fast enough."""

MAX_PEAK = 1.05
"""Of the peak to the least one."""

MAX_NEED = 0.9
"""Up to here the link counts as fast enough."""

MAX_OVER_LAW = 1.02
"""Of the step to what the copies or compute take at least, where it is not."""


@dataclass(frozen=True)
class Found:
    """What a pair of bounds came to."""

    ratio: float
    """Of the step to that without offload."""

    peak: float
    """In any unit."""


Run = Callable[[float, float], Found]


def least_peak(
    caps: Sequence[float], windows: Sequence[float], run: Run, *, halvings: int = 2
) -> float | None:
    """The least peak of pairs with a ratio of at most :data:`MAX_RATIO`; None if there is none.

    Args:
        caps: Of the direction to the host, rising.
        windows: Of the direction to the device, rising.
        run: Tries a pair.
        halvings: How often to look halfway below the best pair, in each direction.
    """
    if not is_fast(run(caps[-1], windows[-1])):
        return None
    best, (cap, window) = min(_edge(caps, windows, run))
    cap, peak = _halved(caps, cap, halvings, lambda one: run(one, window))
    return min(best, peak, _halved(windows, window, halvings, lambda one: run(cap, one))[1])


def _halved(
    values: Sequence[float], fast: float, halvings: int, run: Callable[[float], Found]
) -> tuple[float, float]:
    """The least value found to be fast, between ``fast`` and the one below, and the least peak."""
    slow, peak = max((one for one in values if one < fast), default=0.0), inf
    for _ in range(halvings):
        middle = (slow + fast) / 2
        found = run(middle)
        if is_fast(found):
            fast, peak = middle, min(peak, found.peak)
        else:
            slow = middle
    return fast, peak


def _edge(
    caps: Sequence[float], windows: Sequence[float], run: Run
) -> list[tuple[float, tuple[float, float]]]:
    """Peaks and pairs, from the largest cap and the smallest window to the other corner."""
    fast, row, column = [], len(caps) - 1, 0
    while row >= 0 and column < len(windows):
        pair = caps[row], windows[column]
        found = run(*pair)
        if is_fast(found):
            fast.append((found.peak, pair))
            row -= 1
        else:
            column += 1
    return fast


def is_fast(found: Found) -> bool:
    return found.ratio <= MAX_RATIO


def verdict(ratio: float, peak: float, need: float, best: float | None) -> str:
    """``ok``, or what is wrong: ``slow``, ``peak`` or both.

    Args:
        ratio: Of the step to that without offload.
        peak: Of the device.
        need: How much of compute's time the copies of one direction take.
        best: The least peak of any pair that keeps the step; None if none does.
    """
    if need > MAX_NEED:
        return "ok" if ratio <= MAX_OVER_LAW * max(1.0, need) else "slow"
    wrong = []
    if ratio > MAX_RATIO:
        wrong.append("slow")
    if best is not None and peak > MAX_PEAK * best:
        wrong.append("peak")
    return ", ".join(wrong) or "ok"
