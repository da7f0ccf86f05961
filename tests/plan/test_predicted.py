"""What is predicted in numbers is what the engine does on a virtual device, on random pipelines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers.plans.beside_engine import (
    Run,
    compare,
    ran,
    ran_split,
    ran_v_shaped,
    ran_with_budget,
    ran_with_optimizer,
    ran_with_recomputed,
)
from helpers.plans.ordered_parts import ordered_parts
from helpers.plans.random_pipelines import draw_pipeline
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from pp_offload import OffloadConfig
from pp_offload._core.mover import Counts
from pp_offload.plan import predict, record
from pp_offload.simulate import DEVICES, Modules, PipelineOrder, run_pipeline

pytestmark = pytest.mark.usefixtures("small_floor")


SEEDS = {
    ran: range(10),
    ran_with_recomputed: range(46, 54),
    ran_with_budget: range(300, 304),
    ran_with_optimizer: range(6),
    ran_split: range(5),
    ran_v_shaped: range(4),
}


@pytest.mark.parametrize(
    ("run", "seeds"),
    [
        *((run, seeds[:1]) for run, seeds in SEEDS.items()),
        *(pytest.param(run, seeds, marks=pytest.mark.slow) for run, seeds in SEEDS.items()),
    ],
)
def test_random_pipelines_cost_what_they_cost_the_engine(
    run: Callable[[int], Run], seeds: range
) -> None:
    compare(seeds, run)


def test_without_offload() -> None:
    in_parts = [ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV]
    for seed, schedules in [*product(range(2), [None]), *product(range(2), [in_parts])]:
        drawn = draw_pipeline(seed, schedules=schedules)
        how = drawn.order, drawn.work, drawn.hardware
        with ordered_parts():
            step = run_pipeline(*how, peers=drawn.peers, num_steps=1)
            tapes = record(*how, drawn.config)
        nothing = [Counts() for _ in step.ranks]
        without = replace(drawn, config=None, num_steps=1)  # type: ignore[arg-type]
        assert Run(without, step.ranks, nothing, tapes).differences() == []


# What is not predicted says so


def test_what_is_not_known_is_refused() -> None:
    drawn = draw_pipeline(0)
    how = drawn.order, record(drawn.order, drawn.work, drawn.hardware), drawn.hardware
    with pytest.raises(ValueError, match="tiers name a disk"):
        predict(*how, config=OffloadConfig(tiers=("host", "disk")))
    with pytest.raises(ValueError, match="rank by rank"):
        predict(drawn.order, how[1][:-1], drawn.hardware)


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


@pytest.mark.parametrize(
    ("module", "groups", "message"),
    [
        (PartsOfOne(), {"a": "*"}, "without the rest of its storage"),
        (InEachMicrobatch(), {"a": "*"}, "expected that each saves its own"),
        (ThroughTheHost(), {"a": "2"}, "expected a program without copies of its own"),
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
