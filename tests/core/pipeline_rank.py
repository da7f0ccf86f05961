"""One rank of a gloo pipeline, without offload and with it; run by test_schedules.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.nets import WIDTH
from helpers.sessions import assert_same, in_use
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from pp_offload import OffloadConfig, PipelineOffloadManager, attach, summary_table

MICROBATCHES = 6
SCHEDULES = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}
if torch.__version__ < (2, 13):  # there a rank cannot send to itself over gloo
    del SCHEDULES["zbv"]


class Block(nn.Module):
    """A residual block with a part to offload."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


def make(name: str, rank: int, world: int) -> tuple[Any, list[nn.Module], bool]:
    """The schedule, its modules on this rank, and whether the last stage is among them."""
    indices = {
        "1f1b": [rank],
        "interleaved": [rank, rank + world],
        "zbv": [rank, 2 * world - 1 - rank],
    }[name]
    num_stages = world * len(indices)
    modules: list[nn.Module] = []
    stages = []
    for index in indices:
        torch.manual_seed(1000 + index)
        modules.append(nn.Sequential(Block(), Block()))
        stages.append(PipelineStage(modules[-1], index, num_stages, torch.device("cpu")))
    given = stages[0] if name == "1f1b" else stages
    schedule = SCHEDULES[name](given, MICROBATCHES, loss_fn=nn.functional.mse_loss)  # type: ignore
    return schedule, modules, num_stages - 1 in indices


def train(name: str, is_on: bool) -> list[Tensor]:
    """Three steps, with an evaluation between them; losses and gradients."""
    rank = dist.get_rank()
    schedule, modules, is_last = make(name, rank, dist.get_world_size())
    config = OffloadConfig(min_offloaded_tensor_size=1)
    handle = attach(schedule, {"mlp": "*.mlp"}, config) if is_on else None
    results: list[Tensor] = []
    manager = PipelineOffloadManager.get_instance()
    for step in range(3):
        torch.manual_seed(step)
        x, target = torch.randn(2 * MICROBATCHES, WIDTH), torch.randn(2 * MICROBATCHES, WIDTH)
        losses: list[Tensor] = []
        given = [x] if rank == 0 else []
        options = {"target": target, "losses": losses} if is_last else {}
        schedule.step(*given, **options)
        results += [loss.detach() for loss in losses]
        results += [p.grad.clone() for m in modules for p in m.parameters() if p.grad is not None]
        for module in modules:
            module.zero_grad()
        if name != "zbv":  # PyTorch's own evaluation of it fails
            schedule.eval(*given, **options)
        if is_on:
            assert not any(in_use(manager).values()), (name, step, in_use(manager))
    if handle is not None:
        assert manager.statistics().bytes_offloaded > 0
        for _ in range(1 + rank):  # reset holds no collective, so ranks need not call it together
            manager.reset()
        table = summary_table()
        assert "mlp" in table and all(f"{r}" in table for r in range(dist.get_world_size()))
        handle.detach()
        PipelineOffloadManager.reset_instance()
    return results


def main(rank: int, world: int, directory: Path) -> None:
    """All schedules, one after another, as one of ``world`` processes that share a directory."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for name in SCHEDULES:
        expected = train(name, False)
        assert expected
        assert_same(train(name, True), expected, name)
    if rank == 1:  # a rank without groups takes part in the table as well
        PipelineOffloadManager.reset_instance()
    assert "rank" in summary_table()
    dist.destroy_process_group()
