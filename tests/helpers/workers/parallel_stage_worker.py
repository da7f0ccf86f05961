"""One rank of pipelines whose stages are replicated, sharded or checkpointed as trainers do it; for
``test_parallel_stages``.

A case is ``stage:schedule``, such as ``ddp:1f1b``. In ``blocks`` a stage is what torchtitan makes
of a model: a copy without the other layers, in a ModuleDict, each checkpointed by operator.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from helpers.ranks import run_cases
from helpers.workers.pipeline_worker import Block, Stage
from helpers.workers.steps import beside, pipeline_steps, stage_indices
from pp_offload import OffloadConfig, use_backend
from pp_offload.backends import Backend

CONFIG = OffloadConfig(min_offloaded_tensor_size=1)
GROUPS = {"mlp": "layers.*.mlp"}
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Whole(nn.Module):
    """Eight layers by name, any of which may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Block() for number in range(8)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class EverySecondProduct:
    """Outputs of every second product are saved, counted anew in the forward and when run again."""

    def __init__(self) -> None:
        self.num = {False: 0, True: 0}

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op not in PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.num[context.is_recompute] += 1
        is_saved = self.num[context.is_recompute] % 2
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(EverySecondProduct())


def ddp(index: int, num_stages: int, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(index)
    return DistributedDataParallel(Stage(), process_group=mesh.get_group())


def fsdp2(index: int, num_stages: int, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(index)
    stage = Stage()
    for layer in stage.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    return fully_shard(stage, mesh=mesh, reshard_after_forward=False)


def blocks(index: int, num_stages: int, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    stage = copy.deepcopy(Whole())
    size = len(stage.layers) // num_stages
    for number, name in enumerate(list(stage.layers)):
        if number // size != index:
            del stage.layers[name]
    for name, layer in stage.layers.named_children():
        wrapped = checkpoint_wrapper(layer, context_fn=selective_contexts, early_stop=False)
        stage.layers.register_module(name, wrapped)
    return stage


STAGES = {"ddp": ddp, "fsdp2": fsdp2, "blocks": blocks}
"""Ranks that one pipeline needs: ``blocks`` two of them, the others as many as are not for data."""


def train(is_on: bool, kind: str, name: str) -> list[Tensor]:
    """Three steps; losses and this rank's gradients."""
    world = dist.get_world_size()
    num_ranks = 2 if kind == "blocks" or world > 2 else 1
    shape = (num_ranks, world // num_ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
    rank, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    indices = stage_indices(name, rank, num_ranks)
    num_stages = num_ranks * len(indices)
    modules = {index: STAGES[kind](index, num_stages, mesh["dp"]) for index in indices}
    groups = GROUPS if is_on else None
    return pipeline_steps(name, modules, num_stages, groups=groups, group=group)


def compare(case: str) -> dict[str, Any]:
    """One case, without and with offload."""
    kind, _, name = case.partition(":")
    expected = train(False, kind, name)

    def run(backend: Backend) -> tuple[list[Tensor], dict[str, int]]:
        with use_backend(backend, config=CONFIG) as manager:
            got = train(True, kind, name)
            statistics = manager.statistics()
        return got, {"offloaded": statistics.bytes_offloaded, "live": statistics.live_tensors}

    return beside(expected, run)


if __name__ == "__main__":
    run_cases(compare)
