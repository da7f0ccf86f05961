"""The least memory at which nothing waits, from times that are made up."""

from __future__ import annotations

import pytest

from pp_offload._core.copy_bounds import REFILL_BYTES, refill_below
from pp_offload._groups.auto_bounds import (
    TimedBytes,
    in_flight_bytes,
    is_in_time,
    window_bytes,
)

MB = 10**6


def every(seconds: float, *nbytes: int) -> list[TimedBytes]:
    """A moment each so many seconds; the first one after so many."""
    return [TimedBytes((1 + number) * seconds, size) for number, size in enumerate(nbytes)]


def used(seconds: float, *nbytes: int) -> list[TimedBytes]:
    """The same, of what is used once."""
    return [TimedBytes(at_s, size, size) for at_s, size, _ in every(seconds, *nbytes)]


def waits_s(offloads: list[TimedBytes], cap: int, rate: float) -> float:
    """How long compute waits with a cap: by the rule of ``InFlight.keep_bounded``."""
    waited = free_s = 0.0
    queue: list[TimedBytes] = []
    for at_s, nbytes, _ in offloads:
        now_s = at_s + waited
        free_s = max(free_s, now_s) + nbytes / rate
        queue.append(TimedBytes(free_s, nbytes))
        queue = [copy for copy in queue if copy.at_s > now_s]
        while sum(copy.nbytes for copy in queue) > max(cap, nbytes):
            waited, now_s = waited + queue[0].at_s - now_s, queue[0].at_s
            queue = queue[1:]
    return waited


@pytest.mark.parametrize("rate", [3 * MB, 7 * MB, 9 * MB, 11 * MB, 100 * MB])
@pytest.mark.parametrize("sizes", [[10] * 6, [10, 1, 30, 1, 2, 9], [1, 1, 1, 40], [5]])
def test_at_the_cap_nothing_waits_and_with_a_byte_less_it_does(
    sizes: list[int], rate: float
) -> None:
    offloads = every(1.0, *[size * MB for size in sizes])
    cap = in_flight_bytes(offloads, rate)
    assert waits_s(offloads, cap, rate) == 0
    if cap > max(sizes) * MB:
        assert waits_s(offloads, cap - 1, rate) > 0


@pytest.mark.parametrize("rate", [3 * MB, 7 * MB, 9 * MB, 50 * MB])
@pytest.mark.parametrize("sizes", [[10] * 16, [1, 20, 3, 3, 3, 3, 9, 9, 2, 2, 2, 1], [5]])
def test_a_window_is_in_time_and_little_less_is_not(sizes: list[int], rate: float) -> None:
    uses = used(1.0, *[size * MB for size in sizes])
    window = window_bytes(uses, rate)
    assert is_in_time(uses, window, rate)
    step = max(1, sum(sizes) * MB // 64)
    if window > 2 * step:
        assert not is_in_time(uses, window - 2 * step, rate)


def test_a_window_is_refilled_before_half_of_it_is_used_and_not_for_each_small_tensor() -> None:
    assert refill_below(0) == 0
    assert refill_below(REFILL_BYTES) == REFILL_BYTES // 2
    for window in (2**23, 2**25, 2**30):
        assert window // 2 <= refill_below(window) <= window - REFILL_BYTES


def test_bytes_that_several_share_take_room_until_the_last_of_them_is_used() -> None:
    once = [TimedBytes(at_s, 10, 10) for at_s in (1.0, 2.0, 3.0, 3.0)]
    twice = [TimedBytes(1.0, 10, 0), *once[1:], TimedBytes(3.0, 0, 10)]
    assert is_in_time(once, 20, bytes_per_s=11)
    assert not is_in_time(twice, 20, bytes_per_s=11)
    assert is_in_time(twice, 40, bytes_per_s=11)
