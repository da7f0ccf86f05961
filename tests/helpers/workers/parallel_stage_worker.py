"""One rank of pipelines whose stages are replicated, sharded or checkpointed as trainers do it, and
of groups that save what collectives made; for ``test_parallel_stages``.

A case is ``stage:schedule``, such as ``ddp:1f1b``, ``tensor_parallel`` or ``async_result``. In
``blocks`` a stage is what torchtitan makes of a model: a copy without the other layers, in a
ModuleDict, each checkpointed by operator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from helpers.ranks import run_cases
from helpers.workers.pipeline_worker import Block, Stage
from helpers.workers.steps import WIDTH, beside, draw, pipeline_steps, stage_indices
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload._core.group import Group, GroupState
from pp_offload._core.observer import Observer
from pp_offload._core.payloads import Payloads
from pp_offload.backends import Backend

CONFIG = OffloadConfig(min_offloaded_tensor_size=1)
GROUPS = {"mlp": "layers.*.mlp"}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Leaving(Observer):
    """Counts what leaves, and what of it is of whole parameters."""

    whole: dict[int, Any] = {}

    def __init__(self) -> None:
        self.num_whole = self.num = 0
        self.whole.clear()

    def closed(self, group: Group, payloads: Payloads | None) -> None:
        if payloads is None or group.state is not GroupState.OFFLOADED:
            return
        keys = {tensor.untyped_storage()._cdata for tensor in payloads.tensors}
        self.num += len(keys)
        self.num_whole += len(keys & self.whole.keys())

    @classmethod
    def note(cls, module: nn.Module, args: object) -> None:
        """Before a forward, after FSDP's own hook; holds them, so that no address comes twice."""
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                storage = parameter.untyped_storage()
                cls.whole[storage._cdata] = storage


class Untold(nn.Module):
    """Uses a weight first so that autograd does not see whose it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.detach().t()) @ self.weight


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


def fsdp2(index: int, num_stages: int, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Every layer and its mlp sharded, then the rest."""
    torch.manual_seed(index)
    stage = Stage()
    for layer in stage.layers:
        layer.mlp.append(Untold())
        fully_shard(layer.mlp, mesh=mesh, **options)
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(stage, mesh=mesh, **options)
    for module in stage.modules():
        module.register_forward_pre_hook(Leaving.note)
    return stage


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


STAGES: dict[str, Callable[..., nn.Module]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp2, bf16": partial(fsdp2, mp_policy=BF16),
    "fsdp2, kept": partial(fsdp2, reshard_after_forward=False),
    "blocks": blocks,
}
"""Ranks that one pipeline needs: ``blocks`` two of them, the others as many as are not for data."""


def pipeline(is_on: bool, kind: str, name: str) -> list[Tensor]:
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


def tensor_parallel(is_on: bool) -> list[Tensor]:
    """DTensors whose local tensors come from collectives."""
    mesh = init_device_mesh("cpu", (2,))
    seen: list[Tensor] = []
    for step in range(3):
        if is_on:
            off_interface.reset()
            off_interface.init_chunk_handler(None, None, 1)
        x, y = (DTensor.from_local(t, mesh, [Shard(0)]).requires_grad_() for t in draw(step, 2))
        h = x * 1
        with off_interface(is_on, h, "tp") as h:
            gathered = h.redistribute(mesh, [Replicate()])
            z = (gathered * y.redistribute(mesh, [Replicate()])).sin() @ gathered.t()
            z = z.redistribute(mesh, [Shard(1)]).exp()
        if is_on:
            z = off_interface.group_commit(z, name="tp")
        del h, gathered
        z.sum().full_tensor().backward()
        seen += [z.to_local().detach(), x.grad.to_local(), y.grad.to_local()]
    return seen


def async_result(is_on: bool) -> list[Tensor]:
    """A collective's result that nobody waited for is saved."""
    seen: list[Tensor] = []
    for step in range(3):
        if is_on:
            off_interface.reset()
            off_interface.init_chunk_handler(None, None, 1)
        x, y = draw(step, 2)
        x.requires_grad_()
        with off_interface(is_on, x, "sum") as x:
            summed = collectives.all_reduce(y, "sum", dist.group.WORLD)
            assert type(summed) is collectives.AsyncCollectiveTensor
            z = x * summed
        if is_on:
            z = off_interface.group_commit(z, name="sum")
        del summed
        z.sum().backward()
        seen += [z.detach(), x.grad]
    return seen


def compare(case: str) -> dict[str, Any]:
    """One case, without and with offload."""
    kind, _, schedule = case.partition(":")
    train: Callable[[bool], list[Tensor]] = partial(pipeline, kind=kind, name=schedule)
    if not schedule:
        train = {"tensor_parallel": tensor_parallel, "async_result": async_result}[kind]
    expected = train(False)

    def run(backend: Backend) -> tuple[list[Tensor], dict[str, int]]:
        leaving = Leaving()
        with use_backend(backend, config=CONFIG) as manager:
            manager.offloader.observers.add(leaving)
            got = train(True)
            statistics = manager.statistics()
        return got, {
            "offloaded": statistics.bytes_offloaded,
            "live": statistics.live_tensors,
            "whole": len(leaving.whole),
            "num_whole_left": leaving.num_whole,
        }

    facts = beside(expected, run)
    PipelineOffloadManager.reset_instance()  # before the process group goes
    return facts


if __name__ == "__main__":
    run_cases(compare)
