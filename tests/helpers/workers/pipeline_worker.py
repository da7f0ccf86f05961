"""One rank of a gloo pipeline, without and with offload; run by ``test_pipelining.py``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from schedules import LOOPED, ONE_STAGE, V_SHAPED
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from helpers.ranks import run_cases
from helpers.sessions import MostUnused
from helpers.workers.steps import WIDTH, gradients, stage_indices
from pp_offload import OffloadConfig, PipelineOffloadManager, summary_table
from pp_offload.pipelining import attach

NUM_MICROBATCHES = 8
WINDOW_BYTES = 768
"""Twice what a group saves."""


class Block(nn.Module):
    """A residual block with a part to offload."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Stage(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def make_schedule(
    name: str, virtual: int, microbatches: int, scale_grads: bool, out: str
) -> tuple[Any, list[nn.Module], bool]:
    """The same weights in every run; whether this rank has the last stage."""
    world = dist.get_world_size()
    modules: list[nn.Module] = []
    stages = []
    indices = stage_indices(name, dist.get_rank(), world, virtual)
    num_stages = world * len(indices)
    for index in indices:
        torch.manual_seed(1000 + index)
        modules.append(Stage())
        stages.append(PipelineStage(modules[-1], index, num_stages, torch.device("cpu")))
    options = {"loss_fn": nn.functional.mse_loss, "scale_grads": scale_grads}
    if name in ONE_STAGE:
        schedule = ONE_STAGE[name](stages[0], microbatches, **options)
    elif name == "csv":
        file = Path(out, f"{dist.get_rank()}.csv")
        model = ScheduleInterleavedZeroBubble(stages, microbatches, **options)
        model._dump_csv(str(file), format="compute_only")
        schedule = _PipelineScheduleRuntime(stages, microbatches, **options)
        schedule._load_csv(str(file))
    else:
        schedule = (LOOPED | V_SHAPED)[name](stages, microbatches, **options)
    return schedule, modules, num_stages - 1 in indices


def train(
    name: str,
    virtual: int,
    microbatches: int,
    scale_grads: bool,
    out: str,
    split_backward: str | None,
) -> tuple[list[Tensor], dict[str, Any]]:
    """Three steps with an eval between; losses, gradients, and what the engine says."""
    schedule, modules, is_last = make_schedule(name, virtual, microbatches, scale_grads, out)
    offload = split_backward is not None
    config = OffloadConfig(
        min_offloaded_tensor_size=1,
        prefetch_bytes=WINDOW_BYTES,
        split_backward=split_backward or "reload",
    )
    handle = attach(schedule, {"mlp": "layers.*.mlp"}, config) if offload else None
    facts: dict[str, Any] = {"on_demand": [], "in_use": [], "live": []}
    seen: list[Tensor] = []
    rank = dist.get_rank()
    peak = None if handle is None else MostUnused(handle.manager.offloader)
    for step in range(3):
        if peak is not None and step == 1:
            peak.nbytes = 0  # before, what each part of a backward uses was not known
        torch.manual_seed(step)
        x, target = torch.randn(2 * microbatches, WIDTH), torch.randn(2 * microbatches, WIDTH)
        losses: list[Tensor] = []
        schedule.step(
            *([x] if rank == 0 else []),
            target=target if is_last else None,
            losses=losses if is_last else None,
        )
        seen += [loss.detach() for loss in losses]
        seen += gradients(*modules)
        if name not in V_SHAPED:  # torch's own eval of these fails, with and without offload
            losses = []
            schedule.eval(
                *([x] if rank == 0 else []),
                target=target if is_last else None,
                losses=losses if is_last else None,
            )
            seen += losses
        if offload:
            statistics = PipelineOffloadManager.get_instance().statistics()
            facts["on_demand"].append(statistics.on_demand_reloads)
            facts["in_use"].append(statistics.host_bytes_in_use)
            facts["live"].append(statistics.live_tensors)
            facts["offloaded"] = statistics.bytes_offloaded
    if handle is not None and peak is not None:
        PipelineOffloadManager.get_instance().reset()
        facts["table"] = summary_table()
        facts["unused"] = peak.nbytes
        facts["window"] = handle.manager.offloader.engine.window.bound.nbytes
        handle.detach()
    return seen, facts


def compare(case: str) -> dict[str, Any]:
    """One schedule, such as ``zbv:2:True:keep``, without and with offload."""
    name, virtual, scale_grads, split_backward = case.split(":")
    options = (name, int(virtual), NUM_MICROBATCHES, scale_grads == "True", sys.argv[1])
    without, _ = train(*options, None)
    with_offload, facts = train(*options, split_backward)
    PipelineOffloadManager.reset_instance()
    facts["equal"] = len(without) == len(with_offload) and all(
        torch.equal(a, b) for a, b in zip(without, with_offload, strict=True)
    )
    facts["tensors"] = len(without)
    return facts


if __name__ == "__main__":
    run_cases(compare)
