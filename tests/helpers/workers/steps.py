"""What programs of ranks have alike: inputs, gradients, steps of a pipeline, and two backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from schedules import LOOPED, ONE_STAGE, V_SHAPED
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from pp_offload.backends import Backend, CpuBackend
from pp_offload.pipelining import attach
from pp_offload.testing import SimulatedBackend

WIDTH = 16
NUM_MICROBATCHES = 4


def draw(step: int, num: int = NUM_MICROBATCHES) -> list[Tensor]:
    """Other numbers on each rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return [torch.randn(2, WIDTH, generator=generator) for _ in range(num)]


def gradients(*modules: nn.Module) -> list[Tensor]:
    """This rank's shards of them, which are gone then."""
    grads = [p.grad for module in modules for p in module.parameters() if p.grad is not None]
    for module in modules:
        module.zero_grad()
    return [getattr(grad, "_local_tensor", grad).clone() for grad in grads]


def stage_indices(name: str, rank: int, num_ranks: int, virtual: int = 2) -> list[int]:
    """Which stages a rank has; with two of a V, the first rank has the first and the last."""
    if name in V_SHAPED:
        return [rank, 2 * num_ranks - 1 - rank]
    return [rank + num_ranks * v for v in range(1 if name in ONE_STAGE else virtual)]


def pipeline_steps(
    name: str,
    modules: dict[int, nn.Module],
    num_stages: int,
    *,
    groups: dict[str, str] | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """Three steps; losses and this rank's gradients.

    Args:
        name: Of the schedule.
        modules: This rank's stages, by number.
        num_stages: Of all ranks.
        groups: What leaves, by :func:`attach`; None for what the modules do by themselves.
        group: The ranks of the pipeline; None for all.
    """
    cpu = torch.device("cpu")
    stages = [PipelineStage(m, i, num_stages, cpu, group=group) for i, m in modules.items()]
    several: Any = stages[0] if len(stages) == 1 else stages
    kind = (ONE_STAGE | LOOPED | V_SHAPED)[name]
    schedule = kind(several, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss)
    handle = attach(schedule, groups) if groups else None
    seen: list[Tensor] = []
    for step in range(3):
        x = torch.cat(draw(step))
        losses: list[Tensor] = []
        options = {"target": x, "losses": losses} if num_stages - 1 in modules else {}
        schedule.step(*([x] if 0 in modules else []), **options)
        seen += [loss.detach() for loss in losses] + gradients(*modules.values())
    if handle is not None:
        handle.manager.reset()
        handle.detach()
    return seen


def beside(
    expected: Sequence[Tensor], run: Callable[[Backend], tuple[Sequence[Tensor], dict[str, Any]]]
) -> dict[str, list[Any]]:
    """Facts of a run on each of two backends, by name, and whether its bits are as expected."""
    facts: dict[str, list[Any]] = {}
    for backend in (CpuBackend(), SimulatedBackend("late")):
        got, others = run(backend)
        is_equal = len(got) == len(expected) > 0 and all(map(torch.equal, got, expected))
        for name, fact in {"equal": is_equal, **others}.items():
            facts.setdefault(name, []).append(fact)
    return facts
