"""Random pipelines, run by the engine on virtual devices and predicted in numbers.

ran(seed).differences()    # in words; or of ran_with_recomputed, ran_split
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.pipelining import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from helpers.plans.ordered_parts import ordered_parts
from helpers.plans.random_pipelines import Drawn, draw_pipeline, some_recomputed
from pp_offload._core.mover import Counts
from pp_offload.plan import predict, record
from pp_offload.simulate import RankStep, run_pipeline
from pp_offload.simulate.rank import VirtualRank

SAME = (
    "peak_bytes",
    "host_peak_bytes",
    "bytes_offloaded",
    "on_demand_reloads",
    "num_in_flight",
    "bounds",
)
NEARLY = ("seconds", "busy_s", "stalled_s", "offload_s")
"""To one part in 1e9 of the step: the same times are added up in another order."""


@dataclass
class Run:
    """A pipeline, its last step, what each rank moved, and its tapes."""

    drawn: Drawn
    ranks: list[RankStep]
    moved: list[Counts]
    tapes: Any

    def differences(self) -> list[str]:
        """Compare with what is predicted: times to 1e-9 of the step, all else to the byte."""
        drawn = self.drawn
        with counting() as moved:
            step = predict(drawn.order, self.tapes, drawn.hardware, **drawn.options)
        moved = moved[-len(step.ranks) :]
        unequal = [f"moved: {self.moved} in the run, {moved} predicted"] * (self.moved != moved)
        for number, (rank, predicted) in enumerate(zip(self.ranks, step.ranks, strict=True)):
            for name in (*SAME, *NEARLY):
                a, b = getattr(rank, name), getattr(predicted, name)
                if a != b if name in SAME else abs(a - b) > 1e-9 * rank.seconds:
                    unequal.append(f"{name} of rank {number}: ran {a}, predicted {b}")
        return unequal


def compare(seeds: Iterable[int], ran: Callable[[int], Run]) -> list[Run]:
    """The engine does what is predicted; in half of the pipelines something left."""
    runs = [ran(seed) for seed in seeds]
    assert [run.differences() for run in runs] == [[] for _ in runs]
    num = sum(any(rank.bytes_offloaded for rank in run.ranks) for run in runs)
    assert num >= len(runs) / 2
    return runs


@contextmanager
def counting() -> Iterator[list[Counts]]:
    """What each rank has moved by the end of each step inside."""
    moved: list[Counts] = []
    ended = VirtualRank.ended

    def note(rank: VirtualRank) -> RankStep:
        counts = rank.manager.offloader.engine.mover.counts
        moved.append(replace(counts, step_ms=None, stalled_ms=None))
        return ended(rank)

    with patch.object(VirtualRank, "ended", note):
        yield moved


def ran(seed: int) -> Run:
    return run_and_recorded(draw_pipeline(seed))


def run_and_recorded(drawn: Drawn) -> Run:
    how = drawn.order, drawn.work, drawn.hardware
    with counting() as moved:
        step = run_pipeline(*how, **drawn.options)
    tapes = record(*how, drawn.config)
    return Run(drawn, step.ranks, moved[-len(step.ranks) :], tapes)


def ran_with_budget(seed: int) -> Run:
    """With less host memory than all that leaves would take, on some rank at least."""
    draw = Random(seed)
    drawn = draw_pipeline(seed)
    budget_bytes = int(peak_on_host(drawn) * draw.choice([0.2, 0.5, 0.8, 0.95]))
    config = replace(drawn.config, host_budget_bytes=max(1, budget_bytes))
    return run_and_recorded(replace(drawn, config=config))


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, foreach=False),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True),
}


def ran_with_optimizer(seed: int) -> Run:
    """Of any kind of pipeline, with some parameters frozen in every third one."""
    draw = Random(seed)
    is_split = draw.random() < 0.3
    schedules = [ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble] if is_split else None
    drawn = draw_pipeline(seed, schedules=schedules)
    drawn.work.optimizer = OPTIMIZERS[draw.choice(list(OPTIMIZERS))]
    if seed % 3 == 0:
        for stage in drawn.work.stages:
            for parameter in stage[0].parameters():
                parameter.requires_grad_(draw.random() < 0.5)
    recomputed = some_recomputed(drawn, seed) if draw.random() < 0.3 else nullcontext()
    with ordered_parts() if is_split else nullcontext(), recomputed:
        return run_and_recorded(drawn)


def ran_with_recomputed(seed: int) -> Run:
    drawn = draw_pipeline(seed)
    with some_recomputed(drawn, seed):
        return run_and_recorded(drawn)


def ran_split(seed: int, *schedules: type) -> Run:
    """Backwards in two parts, with some layers recomputed in every fourth one."""
    drawn = draw_pipeline(seed, schedules=schedules or [ScheduleInterleavedZeroBubble])
    with ordered_parts(), some_recomputed(drawn, seed) if seed % 4 == 0 else nullcontext():
        return run_and_recorded(drawn)


def ran_v_shaped(seed: int) -> Run:
    """The same, where two stages of a rank are next to each other."""
    return ran_split(seed, ScheduleZBVZeroBubble, ScheduleDualPipeV)


def peak_on_host(drawn: Drawn) -> int:
    """Of the fullest rank, where there is no limit."""
    how = drawn.order, drawn.work, drawn.hardware
    tapes = record(*how, drawn.config)
    step = predict(drawn.order, tapes, drawn.hardware, **drawn.options)
    return max(rank.host_peak_bytes for rank in step.ranks)
