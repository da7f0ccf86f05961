"""One rank of models sharded with FSDP2, without and with offload; run by ``test_fsdp.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from helpers.ranks import run_cases
from helpers.workers.pipeline_worker import Stage
from helpers.workers.steps import WIDTH, beside, draw, gradients, pipeline_steps, stage_indices
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, offload_modules, use_backend
from pp_offload._core.group import Group, GroupState
from pp_offload._core.observer import Observer
from pp_offload._core.payloads import Payloads
from pp_offload.backends import Backend

CONFIG = OffloadConfig(min_offloaded_tensor_size=1)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SHARDING: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": BF16},
}
GROUPS = {"mlp": "layers.*.mlp", "layer": "layers.*", "all": ["layers.0", "layers.1.mlp"]}


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


def make_stage(mesh: DeviceMesh, seed: int, sharding: str) -> nn.Module:
    """The same weights every time; every layer and its mlp sharded, then the rest."""
    torch.manual_seed(seed)
    stage = Stage()
    for layer in stage.layers:
        layer.mlp.append(Untold())
        fully_shard(layer.mlp, mesh=mesh, **SHARDING[sharding])
        fully_shard(layer, mesh=mesh, **SHARDING[sharding])
    fully_shard(stage, mesh=mesh, **SHARDING[sharding])
    for module in stage.modules():
        module.register_forward_pre_hook(Leaving.note)
    return stage


def alone(is_on: bool, sharding: str, groups: str) -> list[Tensor]:
    """Three steps of four microbatches, two of them in pending."""
    stage = make_stage(init_device_mesh("cpu", (2,)), 1, sharding)
    if is_on:
        offload_modules(stage, {groups: GROUPS[groups]})
    seen: list[Tensor] = []
    for step in range(3):
        waiting: list[Tensor] = []
        if is_on:
            off_interface.reset()
        for x in draw(step):
            if is_on:
                off_interface.init_chunk_handler(None, None, 1)
            waiting.append(stage(x).square().mean())
            if len(waiting) == 2:
                waiting[0].backward()
                seen.append(waiting.pop(0).detach())
        waiting.pop().backward()
        seen += gradients(stage)
    return seen


def pipeline(is_on: bool, sharding: str, name: str) -> list[Tensor]:
    """Two pipeline stages or four, each sharded over as many ranks as are left."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    indices = stage_indices(name, mesh["pp"].get_local_rank(), 2)
    modules = {index: make_stage(mesh["dp"], index, sharding) for index in indices}
    groups = {"mlp": GROUPS["mlp"]} if is_on else None
    group = mesh["pp"].get_group()
    return pipeline_steps(name, modules, 2 * len(indices), groups=groups, group=group)


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


CASES: dict[str, Callable[..., list[Tensor]]] = {
    "alone": alone,
    "pipeline": pipeline,
    "tensor_parallel": tensor_parallel,
    "async_result": async_result,
}


def compare(case: str) -> dict[str, Any]:
    """One case, such as ``alone:bf16:mlp``, without and with offload."""
    name, *options = case.split(":")
    expected = CASES[name](False, *options)

    def run(backend: Backend) -> tuple[list[Tensor], dict[str, int]]:
        leaving = Leaving()
        with use_backend(backend, config=CONFIG) as manager:
            manager.offloader.observers.add(leaving)
            got = CASES[name](True, *options)
            statistics = manager.statistics()
        return got, {
            "offloaded": statistics.bytes_offloaded,
            "live": statistics.live_tensors,
            "whole": len(leaving.whole),
            "num_left": leaving.num,
            "num_whole_left": leaving.num_whole,
        }

    facts = beside(expected, run)
    PipelineOffloadManager.reset_instance()  # before the process group goes
    return facts


if __name__ == "__main__":
    run_cases(compare)
