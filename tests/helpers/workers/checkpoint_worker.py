"""One rank of models with checkpoints, in FSDP1 or pipelines; for ``test_checkpoint_ranks``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from helpers.checkpointed import BY_OP, WAYS, apply
from helpers.ranks import run_cases
from helpers.workers.pipeline_worker import Block, Stage
from helpers.workers.steps import beside, draw, gradients, pipeline_steps, stage_indices
from pp_offload import OffloadActivations
from pp_offload.backends import Backend
from pp_offload.checkpointing import (
    SelectiveOpACParams,
    apply_activation_checkpointing_fsdp1_inplace,
)

Moved = Callable[[], int]
"""Bytes offloaded so far."""


def make_stage(seed: int) -> Stage:
    """The same weights every time."""
    torch.manual_seed(seed)
    return Stage()


def prepared(stage: nn.Module, way: str, backend: Backend | None) -> tuple[nn.Module, Moved]:
    """Checkpointed that way, or with everything offloaded; without a backend as it is."""
    if backend is None:
        return stage, lambda: 0
    if way == "context":
        offload = OffloadActivations(min_offload_size=1, max_fwd_stash_size=2, backend=backend)
        offload.keep_module(stage)
        stage.forward = offload(stage.forward)  # type: ignore[method-assign]
        return stage, lambda: offload.statistics().bytes_offloaded
    stash = apply(stage, "layers", way, backend).stash
    assert stash is not None
    return stage, lambda: stash.statistics().bytes_offloaded


def train(model: nn.Module, num_in_flight: int = 2) -> list[Tensor]:
    """Three steps of four microbatches; losses and this rank's gradients."""
    seen: list[Tensor] = []
    for step in range(3):
        waiting: list[Tensor] = []
        for x in draw(step):
            waiting.append(model(x).square().mean())
            if len(waiting) == num_in_flight:
                waiting[0].backward()
                seen.append(waiting.pop(0).detach())
        while waiting:
            waiting.pop().backward()
        seen += gradients(model)
    return seen


def fsdp1(backend: Backend | None, way: str) -> tuple[list[Tensor], Moved]:
    """Every block sharded over the ranks; it can have one forward in pending."""
    cpu = torch.device("cpu")
    policy = ModuleWrapPolicy({Block})
    model = FullyShardedDataParallel(
        make_stage(1), auto_wrap_policy=policy, device_id=cpu, use_orig_params=True
    )
    if backend is None:
        return train(model, 1), lambda: 0
    variant, params = WAYS[way]
    params = SelectiveOpACParams(**params) if variant is BY_OP else params
    recompute = apply_activation_checkpointing_fsdp1_inplace(
        model, ["Block"], ac_fun_params=params, backend=backend
    )
    assert recompute.stash is not None
    stash = recompute.stash
    return train(model, 1), lambda: stash.statistics().bytes_offloaded


def pipeline(backend: Backend | None, way: str, name: str) -> tuple[list[Tensor], Moved]:
    """One stage per rank, or two in a looped schedule."""
    rank, world = dist.get_rank(), dist.get_world_size()
    indices = stage_indices(name, rank, world)
    made = {index: prepared(make_stage(index), way, backend) for index in indices}
    modules = {index: module for index, (module, _) in made.items()}
    seen = pipeline_steps(name, modules, world * len(indices))
    return seen, lambda: sum(moved() for _, moved in made.values())


CASES: dict[str, Callable[..., tuple[list[Tensor], Moved]]] = {
    "fsdp1": fsdp1,
    "pipeline": pipeline,
}


def compare(case: str) -> dict[str, Any]:
    """One case, such as ``pipeline:full, offload:1f1b``, without and with checkpoints."""
    name, *options = case.split(":")
    expected, _ = CASES[name](None, *options)

    def run(backend: Backend) -> tuple[list[Tensor], dict[str, int]]:
        with backend.activate():
            got, moved = CASES[name](backend, *options)
            return got, {"offloaded": moved()}

    return beside(expected, run)


if __name__ == "__main__":
    run_cases(compare)
