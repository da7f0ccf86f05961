"""What is predicted in numbers is what the engine does on a virtual device, on random pipelines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import predict_exact
import pytest
import torch
from beside_engine import (
    Found,
    compare,
    ran,
    ran_split,
    ran_v_shaped,
    ran_with_budget,
    ran_with_recomputed,
    run_and_recorded,
)
from ordered_parts import ordered_parts
from random_pipelines import draw_pipeline
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from pp_offload import OffloadConfig, config
from pp_offload._core.mover import Counts
from pp_offload._groups import auto_bounds
from pp_offload._groups.plan import Plan
from pp_offload._groups.step import StepRecord
from pp_offload.plan import device, predict, record
from pp_offload.plan import rank as plan_rank
from pp_offload.plan.bounds import Bounds
from pp_offload.plan.device import NumberDevice
from pp_offload.plan.engine import NumberEngine, SharedNumbers
from pp_offload.plan.places import NumberPlaces
from pp_offload.plan.tape import Lost
from pp_offload.simulate import DEVICES, Modules, PipelineOrder, run_pipeline


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models are small, and the floor would leave nothing to choose."""
    monkeypatch.setattr(auto_bounds, "LEAST_IN_FLIGHT_BYTES", 1)


def test_random_pipelines_cost_what_they_cost_the_engine() -> None:
    compare(range(20), ran)


@pytest.mark.slow
def test_more_of_them() -> None:
    compare(range(20, 70), ran)


@pytest.mark.exhaustive
def test_two_thousand_of_them() -> None:
    compare(range(1000, 3000), ran)


def test_with_layers_that_are_recomputed() -> None:
    compare(range(45, 60), ran_with_recomputed)


@pytest.mark.slow
def test_more_with_layers_that_are_recomputed() -> None:
    compare(range(60, 90), ran_with_recomputed)


def test_a_payload_that_is_taken_back_and_then_brought() -> None:
    """Its first memory is free before it has another."""
    assert ran_with_recomputed(75, layers_seed=526).differences() == []


def test_parameters_that_are_not_used_yet_count() -> None:
    """All forwards of a stage come before the first one of the next one on that rank, and the peak
    of the only step comes before that.
    """
    compare(range(1066, 1067), ran)


def test_with_too_little_host_memory() -> None:
    """What finds no room stays on the device, from the first group on that does not fit."""
    compare(range(300, 310), ran_with_budget)


def test_a_budget_binds_in_most_of_them() -> None:
    num = 0
    for seed in range(300, 310):
        found = ran_with_budget(seed)
        without = replace(found.drawn.config, host_budget_bytes=None)
        options = {**found.drawn.options, "config": without}
        step = predict(found.drawn.order, found.tapes, found.drawn.hardware, **options)
        num += any(
            mine.bytes_offloaded < all_of_it.bytes_offloaded
            for mine, all_of_it in zip(found.ran, step.ranks, strict=True)
        )
    assert num >= 5


@pytest.mark.slow
def test_more_with_too_little_host_memory() -> None:
    compare(range(310, 340), ran_with_budget)


def test_with_backwards_in_two_parts() -> None:
    compare(range(12), ran_split)


@pytest.mark.slow
def test_more_with_backwards_in_two_parts() -> None:
    compare(range(12, 40), ran_split)


def test_a_file_with_one_stage_for_each_rank(tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    file.write_text(
        "0F0,0F1,0I0,0F2,0W0,0I1,0F3,0W1,0I2,0W2,0I3,0W3\n"
        "1F0,1I0,1F1,1W0,1I1,1F2,1W1,1I2,1F3,1W2,1I3,1W3\n"
    )
    order = PipelineOrder(file, num_ranks=2, num_stages=2, num_microbatches=4)
    for seed in (0, 4, 5):
        drawn = draw_pipeline(seed, schedules=[ScheduleInterleavedZeroBubble])
        drawn.work.stages[:] = drawn.work.stages[:2]
        with ordered_parts():
            found = run_and_recorded(replace(drawn, order=order))
        assert found.differences() == [], f"seed {seed}"
        assert any(rank.bytes_offloaded for rank in found.ran)


def test_v_shaped() -> None:
    """Two stages of the last rank are next to each other."""
    compare(range(8), ran_v_shaped)


@pytest.mark.slow
def test_more_v_shaped() -> None:
    compare(range(8, 34), ran_v_shaped)


def test_without_offload() -> None:
    in_parts = [ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV]
    for seed, schedules in [*product(range(5), [None]), *product(range(3), [in_parts])]:
        drawn = draw_pipeline(seed, schedules=schedules)
        how = drawn.order, drawn.work, drawn.hardware
        with ordered_parts():
            step = run_pipeline(*how, peers=drawn.peers, num_steps=1)
            tapes = record(*how, drawn.config)
        nothing = [Counts() for _ in step.ranks]
        without = replace(drawn, config=None, num_steps=1)  # type: ignore[arg-type]
        found = Found(without, step.ranks, nothing, tapes)
        assert found.differences() == []


def test_bounds_do_not_outgrow_the_device() -> None:
    endless = ran(219, memory_bytes=2**40)
    full = ran(219, memory_bytes=min(rank.peak_bytes for rank in endless.ran))
    assert full.differences() == []
    full.drawn = endless.drawn
    assert full.differences(), "or it says nothing"


def test_steps_are_timed_again_when_more_leaves() -> None:
    """As the engine does, which has the same numbers."""
    bounds, config = Bounds(OffloadConfig()), OffloadConfig()
    for sent, is_timed in ((100, True), (100, False), (110, False), (111, True), (111, True)):
        number_device = NumberDevice(DEVICES["H100"])
        places = NumberPlaces(config, DEVICES["H100"])
        tier, record = places.tier(number_device, 0.0), StepRecord()
        for what in (sent, None):
            engine = NumberEngine(number_device, tier, record, config)
            bounds.watch(engine, number_device)
            if what is not None:
                bounds.choose(kept=(), unused_bytes=None, sent_bytes=what)
        assert bool(engine.observers.copied) is is_timed


# Each rule counts


FAULTS: dict[str, Callable[..., Any]] = {
    "no bounds are chosen": lambda: patch.object(Bounds, "choose", lambda *a, **k: None),
    "copied again by each group": lambda: patch.object(SharedNumbers, "add", lambda *a: None),
    "the first plan stays": lambda: patch.object(StepRecord, "make_plan", lambda *a: Plan()),
    "a view has what it is of": lambda: patch.dict(plan_rank._TELL, {Lost: lambda *a: None}),
    "host memory comes back for nothing": lambda: patch.object(device, "ROUNDING_BYTES", 2**40),
}


@pytest.fixture(scope="module")
def some() -> list[Found]:
    with patch.object(auto_bounds, "LEAST_IN_FLIGHT_BYTES", 1):
        return [ran_v_shaped(0), *[ran(seed) for seed in (*range(200, 216), 226, 249)]]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_rule_shows(name: str, some: list[Found]) -> None:
    with FAULTS[name]():
        assert any(found.differences() for found in some)
    assert not any(found.differences() for found in some)


def test_the_figure_of_exactness_counts_a_fault() -> None:
    """And one that ends a run is no pipeline that was compared."""
    rows = [predict_exact.compared(0)]
    with FAULTS["host memory comes back for nothing"]():
        rows.append(predict_exact.compared(0))
    with patch("beside_engine.predict", side_effect=ZeroDivisionError("once")):
        rows.append(predict_exact.compared(0))
    found = predict_exact.figures(rows)
    assert (found["num_compared"], found["num_unequal"]) == (2, 1)
    assert found["failed"] == {0: "ZeroDivisionError: once"}


# What is not predicted says so


def test_what_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "TIERS", [*config.TIERS, "own"])  # as add_tier does it
    drawn = draw_pipeline(0)
    tapes = record(drawn.order, drawn.work, drawn.hardware)
    with pytest.raises(ValueError, match="expected the host, the disk, or both"):
        predict(drawn.order, tapes, drawn.hardware, config=OffloadConfig(tiers=("own",)))
    with pytest.raises(ValueError, match="rank by rank"):
        predict(drawn.order, tapes[:-1], drawn.hardware)


class PartsOfOne(nn.Module):
    """Saves a third of a storage."""

    def forward(self, x: Tensor) -> Tensor:
        wide: Tensor = torch.cat([x, x, x], dim=1)
        return (
            wide[:, : x.shape[1]].sigmoid().exp()[:, 1:].tanh() * 2 + wide[:, 1 : x.shape[1]].cos()
        )


class InEachMicrobatch(nn.Module):
    """Saves the same tensor in all of them, which is no parameter and no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [torch.ones(64, 64, device="meta")]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.held[0]


class ThroughTheHost(nn.Module):
    """Copies by itself."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return x.exp().exp()


class Resized(nn.Module):
    """Frees memory behind the engine's back."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y.untyped_storage().resize_(2 * y.untyped_storage().nbytes())
        return x + y.detach()


@pytest.mark.parametrize(
    ("module", "groups", "message"),
    [
        (PartsOfOne(), {"a": "*"}, "without the rest of its storage"),
        (InEachMicrobatch(), {"a": "*"}, "expected that each saves its own"),
        (ThroughTheHost(), {"a": "2"}, "expected a program without copies of its own"),
        (Resized(), {"a": "2"}, "expected tensors that keep theirs"),
    ],
)
def test_a_program_that_is_not_known_is_refused(
    module: nn.Module, groups: dict[str, str], message: str
) -> None:
    stage = nn.Sequential(nn.Linear(64, 64, device="meta"), module, nn.SiLU())
    work = Modules(
        [stage],
        example=torch.empty(64, 64, device="meta"),
        loss_fn=lambda y: y.sum(),
        groups=groups,
    )
    order = PipelineOrder(Schedule1F1B, num_ranks=1, num_stages=1, num_microbatches=2)
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with pytest.raises(ValueError, match=message):
        record(order, work, DEVICES["H100"], config)


def test_what_two_stages_side_by_side_save_is_refused() -> None:
    order = PipelineOrder(ScheduleZBVZeroBubble, num_ranks=2, num_stages=4, num_microbatches=4)
    with torch.device("meta"):
        stages = [nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(4)]
        work = Modules(
            stages, example=torch.empty(64, 64), loss_fn=lambda y: y.sum(), groups={"a": "*"}
        )
    with pytest.raises(ValueError, match="another microbatch or stage saved as well"):
        record(order, work, DEVICES["H100"], OffloadConfig(min_offloaded_tensor_size=1))
