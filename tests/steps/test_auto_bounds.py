"""What the times of a step say, with events whose times are made up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from pp_offload import OffloadConfig
from pp_offload._core.keys import ChunkKey, GroupKey
from pp_offload._core.observer import Lap
from pp_offload._core.stopwatch import Laps
from pp_offload._groups import auto_bounds
from pp_offload._groups.auto_bounds import AutoBounds, Mark, StepTimes, clock_without_waits
from pp_offload._groups.offloader import Offloader
from pp_offload._groups.plan import Plan
from pp_offload.backends import CpuBackend

MB = 10**6


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


def mark(position: int, ms: float, nbytes: int = MB, microbatch: int = 0) -> Mark:
    return Mark(GroupKey(ChunkKey(0, microbatch), position), At(ms), nbytes, freed=nbytes)


def test_what_compute_waited_is_taken_from_the_times() -> None:
    laps = Laps(At(100))
    laps.waits = [lap(120, 130), lap(150, 150), lap(160, 165)]
    clock = clock_without_waits(laps)
    milliseconds = [round(clock(At(ms)) * 1e3, 6) for ms in (100, 119, 130, 155, 165, 200)]
    assert milliseconds == [0, 19, 20, 45, 50, 85]


class StandsStill:
    """A backend whose clock does."""

    is_capturing = False

    def current_stream(self) -> None: ...

    def timed_event(self, stream: None) -> At:
        return At(0)


def times_of(laps: Laps | None = None) -> StepTimes:
    """Of a step with these copies and waits."""
    backend: Any = StandsStill()
    times = StepTimes(At(0), backend)
    vars(times).update(vars(laps or Laps(At(0))))
    return times


def chosen(plan: Plan, offloads: list[Mark], uses: list[Mark], laps: Laps) -> tuple[int, int]:
    offloader = Offloader(CpuBackend(), OffloadConfig())
    bounds = AutoBounds(offloader, OffloadConfig(), lambda: None)
    bounds.end_step(plan, is_complete=True)
    bounds._timed = times_of(laps)
    bounds._timed.sent, bounds._timed.uses = offloads, uses
    bounds.begin_step()
    return offloader.engine.mover.in_flight.bound.nbytes, offloader.engine.window.bound.nbytes


def laps_of_a_slow_link() -> Laps:
    """A byte a microsecond."""
    laps = Laps(At(0))
    laps.offloads, laps.reloads = [lap(0, 1000, MB)], [lap(0, 1000, MB)]
    return laps


@pytest.fixture(autouse=True)
def least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_bounds, "LEAST_IN_FLIGHT_BYTES", 1)


def test_the_chunk_that_needs_most_decides() -> None:
    few = [mark(0, 10), mark(1, 20)]
    many = [mark(n, 10000 + 10 * n, microbatch=1) for n in range(5)]
    uses = [mark(n, 20000 + 10 * n, microbatch=1) for n in range(5)]
    cap, window = chosen(Plan(), few + many, few + uses, laps_of_a_slow_link())
    assert cap == 5 * MB and 4 * MB < window <= 5 * MB
    assert chosen(Plan(), few, few, laps_of_a_slow_link())[0] == 2 * MB


def test_groups_that_will_stay_do_not_count() -> None:
    marks = [mark(n, 10 * n) for n in range(5)]
    plan = Plan(kept=frozenset({marks[3].group, marks[4].group}))
    assert chosen(plan, marks, marks, laps_of_a_slow_link())[0] == 3 * MB


def test_nothing_is_chosen_before_all_has_ended() -> None:
    marks = [mark(n, 10 * n) for n in range(5)]
    before = chosen(Plan(), [], [], Laps(At(0)))
    for event in ("end", "offload"):
        laps = laps_of_a_slow_link()
        if event == "end":
            laps.end = At(1, is_over=False)
        else:
            laps.offloads.append(Lap(At(0), At(1, is_over=False), MB))
        assert chosen(Plan(), marks, marks, laps) == before
