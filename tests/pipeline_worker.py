"""One rank of a gloo pipeline, without and with offload; run by ``test_pipelining.py``."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from pp_offload import OffloadConfig, PipelineOffloadManager, summary_table
from pp_offload.pipelining import attach

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved1f1b": ScheduleInterleaved1F1B,
}
WIDTH = 16


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


def make_schedule(name: str, virtual: int, microbatches: int) -> tuple[Any, list[nn.Module]]:
    """The same weights in every run."""
    rank, world = dist.get_rank(), dist.get_world_size()
    modules: list[nn.Module] = []
    stages = []
    for v in range(virtual):
        index = rank + v * world
        torch.manual_seed(1000 + index)
        modules.append(Stage())
        stages.append(PipelineStage(modules[-1], index, world * virtual, torch.device("cpu")))
    loss_fn = nn.functional.mse_loss
    if name == "interleaved1f1b":
        return ScheduleInterleaved1F1B(stages, microbatches, loss_fn=loss_fn), modules
    return SCHEDULES[name](stages[0], microbatches, loss_fn=loss_fn), modules


def train(
    name: str, virtual: int, microbatches: int, offload: bool
) -> tuple[list[Tensor], dict[str, Any]]:
    """Three steps with an eval between; losses, gradients, and what the engine says."""
    schedule, modules = make_schedule(name, virtual, microbatches)
    config = OffloadConfig(min_offloaded_tensor_size=1)
    handle = attach(schedule, {"mlp": "layers.*.mlp"}, config) if offload else None
    facts: dict[str, Any] = {"on_demand": [], "in_use": [], "live": []}
    seen: list[Tensor] = []
    rank, world = dist.get_rank(), dist.get_world_size()
    is_last = rank == world - 1
    for step in range(3):
        torch.manual_seed(step)
        x, target = torch.randn(2 * microbatches, WIDTH), torch.randn(2 * microbatches, WIDTH)
        losses: list[Tensor] = []
        schedule.step(
            *([x] if rank == 0 else []),
            target=target if is_last else None,
            losses=losses if is_last else None,
        )
        seen += [loss.detach() for loss in losses]
        seen += [p.grad.clone() for m in modules for p in m.parameters() if p.grad is not None]
        for module in modules:
            module.zero_grad()
        if offload:
            statistics = PipelineOffloadManager.get_instance().statistics()
            facts["on_demand"].append(statistics.on_demand_reloads)
            facts["in_use"].append(statistics.host_bytes_in_use)
            facts["live"].append(statistics.live_tensors)
            facts["offloaded"] = statistics.bytes_offloaded
    if handle is not None:
        PipelineOffloadManager.get_instance().reset()
        facts["table"] = summary_table()
        handle.detach()
    return seen, facts


def main() -> None:
    """Train twice and write what came of it."""
    name, virtual, microbatches, out = sys.argv[1:5]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    without, _ = train(name, int(virtual), int(microbatches), offload=False)
    with_offload, facts = train(name, int(virtual), int(microbatches), offload=True)
    facts["equal"] = len(without) == len(with_offload) and all(
        torch.equal(a, b) for a, b in zip(without, with_offload, strict=True)
    )
    facts["tensors"] = len(without)
    Path(out, f"{os.environ['RANK']}.pkl").write_bytes(pickle.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
