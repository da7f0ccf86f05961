"""What is predicted in numbers is what the engine does on a virtual device, on random pipelines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.random_pipelines import (
    Drawn,
    draw_pipeline,
    ordered_parts,
    some_recomputed,
    with_host_memory,
)
from helpers.virtual_training import KIND, chain
from torch import Tensor, nn

from pp_offload import OffloadConfig
from pp_offload._core.mover import Counts
from pp_offload.plan import OffloadPlan, choose, predict, profile, profile_table, record
from pp_offload.simulate import DEVICES, Modules, PipelineOrder, RankStep, run_pipeline
from pp_offload.simulate.pipeline import VirtualRank
from pp_offload.simulate.schedules import SCHEDULES, order_of

pytestmark = pytest.mark.usefixtures("small_floor")

CONFIG = OffloadConfig(min_offloaded_tensor_size=1)
DEVICE = DEVICES["H100"]

SAME = "peak_bytes host_peak_bytes bytes_offloaded on_demand_reloads num_in_flight bounds".split()
NEARLY = "seconds busy_s stalled_s offload_s".split()
"""To one part in 1e9 of the step: the same times are added up in another order."""

Compared = tuple[list[str], bool]


def compared(drawn: Drawn) -> Compared:
    """How the last step of a run differs from what is predicted, and whether something left.

    Times are compared to 1e-9 of the step, all else to the byte, with all that ranks have moved.
    """
    how, moved, ended = (drawn.order, drawn.work, drawn.hardware), list[Counts](), VirtualRank.ended

    def note(rank: VirtualRank) -> RankStep:
        counts = rank.manager.offloader.engine.mover.counts
        moved.append(replace(counts, step_ms=None, stalled_ms=None))
        return ended(rank)

    with patch.object(VirtualRank, "ended", note):
        ranks = run_pipeline(*how, **drawn.options).ranks
        moved_in_run = moved[-len(ranks) :]
        tapes = record(*how, drawn.config)
        predicted = predict(drawn.order, tapes, drawn.hardware, **drawn.options).ranks
    moved = moved[-len(ranks) :]
    unequal = [f"moved: {moved_in_run} in the run, {moved} predicted"] * (moved_in_run != moved)
    for number, (rank, other) in enumerate(zip(ranks, predicted, strict=True)):
        for name in (*SAME, *NEARLY):
            a, b = getattr(rank, name), getattr(other, name)
            if a != b if name in SAME else abs(a - b) > 1e-9 * rank.seconds:
                unequal.append(f"{name} of rank {number}: ran {a}, predicted {b}")
    return unequal, any(rank.bytes_offloaded for rank in ranks)


def plain(seed: int) -> Compared:
    return compared(draw_pipeline(seed))


def with_budget(seed: int) -> Compared:
    """With less host memory than all that leaves would take, on some rank at least."""
    drawn = draw_pipeline(seed)
    tapes = record(drawn.order, drawn.work, drawn.hardware, drawn.config)
    part = Random(seed).choice([0.2, 0.5, 0.8, 0.95])
    return compared(with_host_memory(drawn, tapes, part)[0])


IN_PARTS = [SCHEDULES[name] for name in ("interleavedzerobubble", "zbv", "dualpipev")]
"""Schedules whose backwards are in two parts."""

OPTIMIZERS: list[Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.Adam(p, amsgrad=True),
    lambda p: torch.optim.AdamW(p),
    lambda p: torch.optim.AdamW(p, foreach=False),
    lambda p: torch.optim.RMSprop(p, centered=True),
]


def with_optimizer(seed: int) -> Compared:
    """Of any kind of pipeline, with some parameters frozen in every third of them."""
    draw = Random(seed)
    is_split = draw.random() < 0.3
    schedules = IN_PARTS[:2] if is_split else None
    drawn = draw_pipeline(seed, schedules=schedules)
    drawn.work.optimizer = draw.choice(OPTIMIZERS)
    if seed % 3 == 0:
        for stage in drawn.work.stages:
            for parameter in stage[0].parameters():
                parameter.requires_grad_(draw.random() < 0.5)
    recomputed = some_recomputed(drawn, seed) if draw.random() < 0.3 else nullcontext()
    with ordered_parts() if is_split else nullcontext(), recomputed:
        return compared(drawn)


def with_recomputed(seed: int) -> Compared:
    drawn = draw_pipeline(seed)
    with some_recomputed(drawn, seed):
        return compared(drawn)


def split(seed: int, *schedules: type) -> Compared:
    """Backwards in two parts, with some layers recomputed in every fourth pipeline."""
    drawn = draw_pipeline(seed, schedules=schedules or IN_PARTS[:1])
    with ordered_parts(), some_recomputed(drawn, seed) if seed % 4 == 0 else nullcontext():
        return compared(drawn)


def v_shaped(seed: int) -> Compared:
    """The same, where two stages of a rank are next to each other."""
    return split(seed, *IN_PARTS[1:])


SEEDS = {
    plain: range(10),
    with_recomputed: range(46, 54),
    with_budget: range(300, 304),
    with_optimizer: range(6),
    split: range(5),
    v_shaped: range(6, 10),
}


@pytest.mark.parametrize(
    ("run", "seeds"),
    [
        *((run, seeds[:1]) for run, seeds in SEEDS.items()),
        *(pytest.param(run, seeds, marks=pytest.mark.slow) for run, seeds in SEEDS.items()),
    ],
)
def test_random_pipelines_cost_what_they_cost_the_engine(
    run: Callable[[int], Compared], seeds: range
) -> None:
    """In half of them something leaves."""
    differences, leaves = zip(*map(run, seeds), strict=True)
    assert list(differences) == [[] for _ in seeds]
    assert sum(leaves) >= len(seeds) / 2


@pytest.mark.parametrize("schedules", [None, IN_PARTS], ids=["whole", "in parts"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_without_offload(seed: int, schedules: list[type] | None) -> None:
    drawn = replace(draw_pipeline(seed, schedules=schedules), config=None)  # type: ignore[arg-type]
    with ordered_parts():
        assert compared(drawn) == ([], False)


# An optimizer at the end of each step: its state, what it takes on the way, and its time


def with_large_layers(optimizer: Any) -> tuple[PipelineOrder, Modules]:
    """Two ranks, each with a stage of two layers that are large beside what they save."""
    work = chain(
        2,
        lambda: [nn.Sequential(nn.Linear(512, 512, **KIND), nn.GELU()) for _ in "ab"],
        torch.empty(64, 512, **KIND),
        optimizer=optimizer,
    )
    return order_of("1f1b", num_ranks=2, stages_per_rank=1, num_microbatches=4), work


@pytest.mark.parametrize(
    ("optimizer", "of_a_parameter"), [*zip(OPTIMIZERS, [0, 1, 3, 2, 2, 2], strict=True)]
)
def test_a_plan_is_below_its_limit_with_its_state(optimizer: Any, of_a_parameter: int) -> None:
    """Which is there from the first step on."""
    order, work = with_large_layers(optimizer)
    tapes = record(order, work, DEVICE, CONFIG)
    none = predict(order, tapes, DEVICE, num_steps=2)
    most = max(rank.peak_bytes for rank in none.ranks)
    plan = choose(order, tapes, DEVICE, most - 1, config=CONFIG)
    step = run_pipeline(order, work, DEVICE, config=replace(CONFIG, plan=plan), num_steps=3)
    for rank, cost, stage in zip(plan.ranks, step.ranks, work.stages, strict=True):
        assert rank.peak_bytes == cost.peak_bytes < most
        own_bytes = sum(parameter.nbytes for parameter in stage.parameters())
        assert rank.optimizer_bytes == of_a_parameter * own_bytes
    assert plan.seconds >= plan.least_seconds * (1 - 1e-9)
    assert OffloadPlan.from_dict(plan.to_dict()) == plan


def test_a_prediction_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Of steps in which compute waits, an engine warns."""
    drawn = draw_pipeline(0)
    tapes = record(drawn.order, drawn.work, drawn.hardware, drawn.config)
    caplog.clear()
    predict(drawn.order, tapes, drawn.hardware, config=drawn.config, num_steps=4)
    assert not caplog.records


# What is not predicted says so


def test_what_is_not_known_is_refused() -> None:
    drawn = draw_pipeline(0)
    how = drawn.order, record(drawn.order, drawn.work, drawn.hardware), drawn.hardware
    with pytest.raises(ValueError, match="tiers name a disk"):
        predict(*how, config=OffloadConfig(tiers=("host", "disk")))
    with pytest.raises(ValueError, match="rank by rank"):
        predict(drawn.order, how[1][:-1], drawn.hardware)


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
        (InEachMicrobatch(), {"a": "*"}, "expected that each saves its own"),
        (ThroughTheHost(), {"a": "2"}, "expected a program without copies of its own"),
    ],
)
def test_a_program_that_is_not_known_is_refused(
    module: nn.Module, groups: dict[str, str], message: str
) -> None:
    stage = nn.Sequential(nn.Linear(64, 64, device="meta"), module, nn.SiLU())
    x = torch.empty(64, 64, device="meta")
    work = Modules([stage], example=x, loss_fn=lambda y: y.sum(), groups=groups)
    order = order_of("1f1b", num_ranks=1, stages_per_rank=1, num_microbatches=2)
    with pytest.raises(ValueError, match=message):
        record(order, work, DEVICE, CONFIG)


# Recordings: short; and their profile


@pytest.mark.parametrize(
    ("schedule", "per_rank", "expected"),
    [("1f1b", 1, 8), ("interleaved1f1b", 2, 8), ("gpipe", 1, 32)],
)
def test_a_short_step_holds_as_many_microbatches(
    schedule: str, per_rank: int, expected: int
) -> None:
    """Of GPipe all are held, so none may be left out."""
    order = order_of(schedule, num_ranks=4, stages_per_rank=per_rank, num_microbatches=32)
    assert order.shortened().num_microbatches == expected


WIDTH, LENGTH = 4096, 8192


class Mlp(nn.Module):
    """Of four widths, with its norm."""

    def __init__(self) -> None:
        super().__init__()
        up, down = nn.Linear(WIDTH, 4 * WIDTH, **KIND), nn.Linear(4 * WIDTH, WIDTH, **KIND)
        self.part = nn.Sequential(nn.LayerNorm(WIDTH, **KIND), up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(x)


def test_a_profile_is_what_a_hand_counts() -> None:
    """Groups save 20 bytes of a token and unit of the width; a recomputed layer keeps its input."""
    example, groups = torch.empty(LENGTH, WIDTH, **KIND), {"mlp": "*.part"}
    work = chain(2, lambda: [Mlp() for _ in range(3)], example, groups=groups, layers="*")
    order = order_of("1f1b", num_ranks=2, stages_per_rank=1, num_microbatches=2)
    tapes = record(order, work, DEVICE, OffloadConfig(rematerialize="none"))
    text = profile_table(profile(tapes, DEVICE))
    rows = text.splitlines()
    assert rows[3].split() == "mlp 0-1 4 640.0 3.95 8.28 13.46 161.9".split()
    assert "The link carries 47.7" in text
    stages = rows[next(i for i, row in enumerate(rows) if row.startswith("stage")) :]
    assert stages[2].split() == "0 0 1.00 1.88 1.94 0.38 12.08 24.74 2.10 0.56".split()
