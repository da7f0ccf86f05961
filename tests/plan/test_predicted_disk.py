"""Steps that go to the disk, predicted in numbers, on random pipelines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from beside_engine import Found, compare, drawn_of_any_kind, ran_with_disk, run_and_recorded
from random_pipelines import draw_pipeline

from pp_offload._memory.host import HostMemory
from pp_offload._steps import auto_bounds
from pp_offload.plan import copies as plan_copies
from pp_offload.plan import disk as plan_disk
from pp_offload.plan import places as plan_places
from pp_offload.plan import predict, record
from pp_offload.plan import rank as plan_rank
from pp_offload.plan.chunks import Held, Saved
from pp_offload.plan.device import NumberDevice
from pp_offload.plan.disk import Disk, NumberFile
from pp_offload.plan.pending_reloads import PendingReloads
from pp_offload.plan.places import budgets_of
from pp_offload.plan.tape import Payload
from pp_offload.plan.transfer import Transfer
from pp_offload.simulate import DEVICES


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models are small, and the floor would leave nothing to choose."""
    monkeypatch.setattr(auto_bounds, "LEAST_IN_FLIGHT_BYTES", 1)


def test_random_pipelines_cost_what_they_cost_the_engine() -> None:
    compare(range(10), ran_with_disk)


@pytest.mark.slow
def test_more_of_them() -> None:
    compare(range(10, 30), ran_with_disk)


@pytest.mark.exhaustive
def test_a_thousand_of_them() -> None:
    compare(range(1000, 2000), ran_with_disk)


def test_where_the_file_is_does_not_matter(tmp_path: Path) -> None:
    """Nothing is recorded there, and nothing is predicted of it."""
    drawn = draw_pipeline(0)
    steps = []
    for config in (
        replace(drawn.config, tiers=("disk",)),
        replace(drawn.config, tiers=("disk",), disk_dir=tmp_path / "nowhere"),
    ):
        tapes = record(drawn.order, drawn.work, drawn.hardware, config)
        steps.append(predict(drawn.order, tapes, drawn.hardware, config=config))
    assert steps[0] == steps[1] and not any(tmp_path.iterdir())


# Work of a step that the next one begins with


def ran_with_slow_writes(seed: int) -> Found:
    """So slow that the disk writes for nobody when backward has taken all from host memory."""
    with drawn_of_any_kind(seed) as drawn:
        link = drawn.hardware.link_bytes_per_s
        hardware = replace(drawn.hardware, disk_write_bytes_per_s=link / 1000)
        config = replace(drawn.config, tiers=("disk",), max_in_flight_bytes=2**40)
        num_steps = max(2, drawn.num_steps)
        drawn = replace(drawn, hardware=hardware, config=config, num_steps=num_steps)
        return run_and_recorded(drawn)


@pytest.mark.parametrize("seed", [8, 10, 22])
def test_what_is_written_still_goes_on_in_the_next_step(seed: int) -> None:
    found = ran_with_slow_writes(seed)
    assert found.differences() == []
    with patch.object(NumberFile, "begin_step", at_rest):
        assert found.differences(), "nothing was"


def at_rest(file: Any, host: Any, begin_s: float) -> None:
    file._clock = plan_disk.DiskClock(host)


# Each rule counts


class NeverReadAhead(Disk):
    def _load_ahead(self, tickets: Any) -> int:
        return 0


class EachForItself(Disk):
    def _all_of(self, block: Any, asked: Any) -> Any:
        return list(asked)


class NothingExpected(PendingReloads):
    def expect(self, saved: Any) -> None:
        pass


class ExpectedTwice(PendingReloads):
    def begin(self, saved: Any, arrival: Any) -> None:
        for one in saved:
            one.arrival = None
        super().begin(saved, arrival)


class SharedTwice(PendingReloads):
    def share(self, one: Any) -> bool:
        was_expected = one.arrival is not None
        has_shared = super().share(one)
        self.nbytes += one.nbytes * (was_expected and has_shared)
        return has_shared


class OnlyWhenAskedFor(Transfer):
    @property
    def is_bringing(self) -> bool:
        return False


class OneTier(Transfer):
    def __init__(self, copies: Any, tiers: Any) -> None:
        super().__init__(copies, tiers[-1:])


FAULTS: dict[str, Callable[[], Any]] = {
    one.__name__: lambda one=one, name=name, where=where: patch.object(where, name, one)
    for name, where, some in (
        ("Disk", plan_disk, (NeverReadAhead, EachForItself)),
        ("PendingReloads", plan_copies, (NothingExpected, ExpectedTwice, SharedTwice)),
        ("Transfer", plan_rank, (OnlyWhenAskedFor, OneTier)),
    )
    for one in some
} | {
    "nothing is left of the budget for the way": lambda: patch.object(
        plan_places, "budgets_of", lambda config: budgets_of(config)[1:] * 2
    ),
    "buffers may be in pieces": lambda: patch.object(
        plan_places, "HostMemory", lambda *a, **k: HostMemory(*a)
    ),
}


@pytest.fixture(scope="module")
def some() -> list[Found]:
    with patch.object(auto_bounds, "LEAST_IN_FLIGHT_BYTES", 1):
        return [ran_with_disk(seed) for seed in (0, 5, 9, 47)]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_rule_shows(name: str, some: list[Found]) -> None:
    with FAULTS[name]():
        assert any(found.differences() for found in some)
    assert not any(found.differences() for found in some)


def test_what_is_read_ahead_for_nobody_counts_no_more() -> None:
    """As where a backward does without something that it was expected to ask for."""
    reloads = PendingReloads(NumberDevice(DEVICES["H100"]))
    one = Saved(Payload(512, 512, source=0, num_uses=1), 0, Held(512))
    reloads.expect([one])
    reloads.forget(one)
    assert reloads.nbytes == 512
    reloads.poll()
    assert reloads.nbytes == 0 and one.reload is None
