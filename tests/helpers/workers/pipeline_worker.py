"""One rank of a gloo pipeline, without and with offload; run by ``test_pipelining.py``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from helpers.ranks import run_cases
from helpers.workers.steps import (
    V_SHAPED,
    WIDTH,
    Stage,
    gradients,
    inputs_of,
    is_same,
    make_schedule,
    stage_indices,
)
from pp_offload import OffloadConfig, PipelineOffloadManager, summary_table
from pp_offload.pipelining import attach

WINDOW_BYTES = 768
"""Twice what a group saves."""


def train(
    name: str, virtual: str, scale_grads: str, split_backward: str, *, is_on: bool
) -> tuple[list[Tensor], dict[str, Any]]:
    """Three steps with an eval between; losses, gradients, and what the engine says."""
    rank, world = dist.get_rank(), dist.get_world_size()
    indices = stage_indices(name, rank, world, int(virtual))
    num_stages, num_microbatches = world * len(indices), 2 * world
    modules: dict[int, nn.Module] = {}
    for index in indices:
        torch.manual_seed(1000 + index)
        modules[index] = Stage()
    kind, options = name, {"scale_grads": scale_grads == "True"}
    if name == "csv":
        kind = "interleavedzerobubble"
    schedule = make_schedule(kind, modules, num_stages, num_microbatches, **options)
    if name == "csv":
        file = Path(sys.argv[1], f"{rank}.csv")
        schedule._dump_csv(str(file), format="compute_only")
        stages, loss_fn = schedule._stages, nn.functional.mse_loss
        schedule = _PipelineScheduleRuntime(stages, num_microbatches, loss_fn=loss_fn, **options)
        schedule._load_csv(str(file))
    config = OffloadConfig(
        min_offloaded_tensor_size=1, prefetch_bytes=WINDOW_BYTES, split_backward=split_backward
    )
    handle = attach(schedule, {"mlp": "layers.*.mlp"}, config) if is_on else None
    facts: dict[str, Any] = {"steps": []}
    seen: list[Tensor] = []
    for step in range(3):
        torch.manual_seed(step)
        x, target = torch.randn(2, 2 * num_microbatches, WIDTH)
        inputs, options = inputs_of(x, target, modules, num_stages)
        schedule.step(*inputs, **options)
        seen += [loss.detach() for loss in options.get("losses", ())]
        seen += gradients(*modules.values())
        if name not in V_SHAPED:  # torch's own eval of these fails, with and without offload
            inputs, options = inputs_of(x, target, modules, num_stages)
            schedule.eval(*inputs, **options)
            seen += options.get("losses", ())
        if handle is not None:
            facts["steps"].append(handle.manager.statistics())
    if handle is not None:
        PipelineOffloadManager.get_instance().reset()
        facts["table"] = summary_table()
        handle.detach()
    return seen, facts


def compare(case: str) -> dict[str, Any]:
    """One schedule, such as ``zbv:2:True:keep``, without and with offload."""
    expected, _ = train(*case.split(":"), is_on=False)
    got, facts = train(*case.split(":"), is_on=True)
    PipelineOffloadManager.reset_instance()
    return {**facts, "equal": is_same(got, expected)}


if __name__ == "__main__":
    run_cases(compare)
