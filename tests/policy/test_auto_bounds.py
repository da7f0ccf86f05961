"""The least memory at which nothing waits, from times that are made up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from pp_offload import CpuBackend, OffloadConfig
from pp_offload._core.group import ChunkKey, GroupKey
from pp_offload._core.observers import Lap, Laps
from pp_offload._groups import auto_bounds
from pp_offload._groups.auto_bounds import (
    AutoBounds,
    Mark,
    StepTimes,
    TimedBytes,
    clock_without_waits,
    in_flight_bytes,
    is_in_time,
    least_bounds,
    window_bytes,
)
from pp_offload._groups.offloader import Offloader

MB = 10**6


def every(seconds: float, *nbytes: int) -> list[TimedBytes]:
    """A moment each so many seconds; the first one after so many."""
    return [TimedBytes((1 + number) * seconds, size) for number, size in enumerate(nbytes)]


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
    uses = [use._replace(freed=use.nbytes) for use in every(1.0, *[size * MB for size in sizes])]
    window = window_bytes(uses, rate)
    assert is_in_time(uses, window, rate)
    step = max(1, sum(sizes) * MB // 64)
    if window > 2 * step:
        assert not is_in_time(uses, window - 2 * step, rate)


def test_bytes_that_several_share_take_room_until_the_last_of_them_is_used() -> None:
    once = [TimedBytes(at_s, 10, 10) for at_s in (1.0, 2.0, 3.0, 3.0)]
    twice = [TimedBytes(1.0, 10, 0), *once[1:], TimedBytes(3.0, 0, 10)]
    assert is_in_time(once, 20, bytes_per_s=11)
    assert not is_in_time(twice, 20, bytes_per_s=11)
    assert is_in_time(twice, 40, bytes_per_s=11)


# From events to times


@dataclass
class At:
    """An event."""

    ms: float
    is_over: bool = True

    def elapsed_time(self, end: Any) -> float:
        return float(end.ms - self.ms)

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        raise AssertionError("nobody waits for times")


def lap(begin_ms: float, end_ms: float, nbytes: int = 0) -> Lap:
    return Lap(At(begin_ms), At(end_ms), nbytes)


def mark(position: int, ms: float, microbatch: int = 0) -> Mark:
    return Mark(GroupKey(ChunkKey(0, microbatch), position), At(ms), MB, freed=MB)


def times_of(sent: list[Mark], uses: list[Mark]) -> StepTimes:
    """Of a step over a slow link: a byte a microsecond."""
    times = StepTimes(At(0), CpuBackend())
    times.sent, times.uses = sent, uses
    times.offloads, times.reloads = [lap(0, 1000, MB)], [lap(0, 1000, MB)]
    return times


def test_what_compute_waited_is_taken_from_the_times() -> None:
    laps = Laps(At(100))
    laps.waits = [lap(120, 130), lap(150, 150), lap(160, 165)]
    clock = clock_without_waits(laps)
    milliseconds = [round(clock(At(ms)) * 1e3, 6) for ms in (100, 119, 130, 155, 165, 200)]
    assert milliseconds == [0, 19, 20, 45, 50, 85]


def test_the_chunk_that_needs_most_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for groups that will stay."""
    monkeypatch.setattr(auto_bounds, "LEAST_IN_FLIGHT_BYTES", 1)
    few = [mark(0, 10), mark(1, 20)]
    many = [mark(n, 10000 + 10 * n, microbatch=1) for n in range(5)]
    uses = [mark(n, 20000 + 10 * n, microbatch=1) for n in range(5)]
    bounds = least_bounds(times_of(few + many, few + uses), staying=())
    assert bounds is not None and bounds[0] == 5 * MB and 4 * MB < bounds[1] <= 5 * MB
    bounds = least_bounds(times_of(few, few), staying=())
    assert bounds is not None and bounds[0] == 2 * MB
    bounds = least_bounds(times_of(many, uses), staying={many[3].group, many[4].group})
    assert bounds is not None and bounds[0] == 3 * MB


@pytest.mark.parametrize("late", ["end", "offload", None])
def test_nothing_is_chosen_before_all_has_ended(late: str | None) -> None:
    marks = [mark(n, 10 * n) for n in range(5)]
    times = times_of(marks, marks)
    if late == "end":
        times.end = At(1, is_over=False)
    elif late == "offload":
        times.offloads.append(Lap(At(0), At(1, is_over=False), MB))
    bounds = AutoBounds(Offloader(CpuBackend(), OffloadConfig()), OffloadConfig(), lambda: None)
    before, bounds._timed = bounds.now, times
    bounds.begin_step()
    assert (bounds.now == before) is (late is not None)
