"""What programs of ranks have alike: a model, inputs, gradients, and schedules."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from schedules import LOOPED, ONE_STAGE, V_SHAPED
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

WIDTH = 16
NUM_MICROBATCHES = 4


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
        for layer in self.layers.children():
            x = layer(x)
        return x


def draw(step: int, num: int = NUM_MICROBATCHES) -> list[Tensor]:
    """Other numbers on each rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(num)]


def gradients(*modules: nn.Module) -> list[Tensor]:
    """This rank's shards of them, which are gone then."""
    grads = [p.grad for module in modules for p in module.parameters() if p.grad is not None]
    for module in modules:
        module.zero_grad()
    return [getattr(grad, "_local_tensor", grad).clone() for grad in grads]


def is_same(got: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether there are tensors, and all are equal bit for bit."""
    return len(got) == len(expected) > 0 and all(map(torch.equal, got, expected))


def stage_indices(name: str, rank: int, num_ranks: int, virtual: int = 2) -> list[int]:
    """Which stages a rank has; with two of a V, the first rank has the first and the last."""
    if name in V_SHAPED:
        return [rank, 2 * num_ranks - 1 - rank]
    return [rank + num_ranks * v for v in range(1 if name in ONE_STAGE else virtual)]


def make_schedule(
    name: str, modules: dict[int, nn.Module], num_stages: int, num_microbatches: int, **options: Any
) -> Any:
    """A schedule over this rank's stages, which are given by number.

    ``options`` are of the schedule, and ``group``: the ranks of the pipeline if these are not all.
    """
    cpu, group = torch.device("cpu"), options.pop("group", None)
    stages = [PipelineStage(m, i, num_stages, cpu, group=group) for i, m in modules.items()]
    several: Any = stages[0] if name in ONE_STAGE else stages
    kind = (ONE_STAGE | LOOPED | V_SHAPED)[name]
    return kind(several, num_microbatches, loss_fn=nn.functional.mse_loss, **options)


def inputs_of(
    x: Tensor, target: Tensor, modules: dict[int, nn.Module], num_stages: int
) -> tuple[list[Tensor], dict[str, Any]]:
    """What this rank gives a step of its schedule: arguments, and options with a list of losses."""
    options = {"target": target, "losses": []} if num_stages - 1 in modules else {}
    return [x] if 0 in modules else [], options
