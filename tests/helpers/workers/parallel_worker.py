"""One rank of models that are replicated, sharded, cut into stages, or exchange activations; for
``test_parallel.py``.

A case is ``replica/WRAPPER/PRODUCT``, ``stage/KIND/SCHEDULE``, which may go on with the number of
virtual stages and the option ``split_backward``, or ``collective``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from schedules import LOOPED, ONE_STAGE, V_SHAPED
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from helpers.checkpointed import BY_OP, WAYS
from helpers.products import PRODUCTS, Checkpoints, Product
from helpers.ranks import run_cases
from helpers.sessions import begin_step, group
from helpers.workers.models import WIDTH, Block, Experts, Ring, Stage
from pp_offload import OffloadConfig, PipelineOffloadManager, summary_table, use_backend
from pp_offload._core.group import Group, GroupState
from pp_offload._core.observers import Observer
from pp_offload._core.payloads import Payloads
from pp_offload.backends import Backend, CpuBackend
from pp_offload.checkpointing import (
    SelectiveOpACParams,
    apply_activation_checkpointing_fsdp1_inplace,
)
from pp_offload.pipelining import attach
from pp_offload.testing import SimulatedBackend

NUM_MICROBATCHES = 4
CONFIG = OffloadConfig(min_offloaded_tensor_size=1)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

Trained = tuple[list[Tensor], dict[str, Any]]
"""All numbers, and facts about the offload."""


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

    def facts(self, *counted: Any) -> dict[str, int]:
        """Of a run, with the statistics of all that offloads."""
        statistics = [each.statistics() for each in counted]
        return {
            "offloaded": sum(each.bytes_offloaded for each in statistics),
            "live": sum(each.live_tensors for each in statistics),
            "seen": self.num,
            "whole": len(self.whole),
            "whole seen": self.num_whole,
        }


# Models that are replicated or sharded, or whose layers exchange activations


class Wrapper(NamedTuple):
    """Another model's owner."""

    wrap: Callable[[nn.Module], nn.Module]

    syncs_each: bool = True
    """Whether gradients move after every microbatch; else after the last one of a step."""

    num_in_flight: int = 1


def sharded(model: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def sharded_by_the_first(model: nn.Module) -> nn.Module:
    policy, cpu = ModuleWrapPolicy({Block}), torch.device("cpu")
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=cpu, use_orig_params=True
    )


def exchanging(kind: Callable[[], nn.Module]) -> Wrapper:
    def wrap(model: nn.Module) -> nn.Module:
        torch.manual_seed(dist.get_rank())
        for layer in model.layers:  # type: ignore[union-attr]
            layer.mlp = kind()
        return model

    return Wrapper(wrap, num_in_flight=2)


ddp = DistributedDataParallel
WRAPPERS = {
    "ddp": Wrapper(ddp),
    "ddp, accumulated": Wrapper(ddp, syncs_each=False),
    "ddp, static graph": Wrapper(partial(ddp, static_graph=True, gradient_as_bucket_view=True)),
    "ddp, unused": Wrapper(partial(ddp, find_unused_parameters=True)),
    "fsdp1": Wrapper(sharded_by_the_first),
    "fsdp2": Wrapper(sharded, num_in_flight=2),
    "fsdp2, accumulated": Wrapper(sharded, syncs_each=False, num_in_flight=2),
    "fsdp2, bf16": Wrapper(partial(sharded, mp_policy=BF16)),
    "fsdp2, kept": Wrapper(partial(sharded, reshard_after_forward=False)),
    "ring": exchanging(Ring),
    "experts": exchanging(Experts),
}


class CheckpointsInPlace(Checkpoints):
    """Of the blocks of a model in FSDP1."""

    def inside(self, model: nn.Module) -> nn.Module:
        return model

    def outside(self, model: nn.Module) -> None:
        variant, params = WAYS[self.way]
        params = SelectiveOpACParams(**params) if variant is BY_OP else params
        recompute = apply_activation_checkpointing_fsdp1_inplace(
            model, ["Block"], ac_fun_params=params, backend=self.backend
        )
        self.keep(recompute.stash)


IN_PLACE = {
    f"in place, {way}": partial(CheckpointsInPlace, way=way)
    for way in ("full, offload", "all, offload")
}


def replica(backend: Backend | None, name: str, product_name: str) -> Trained:
    """Three steps of four microbatches: losses, and this rank's gradients and parameters."""
    wrapper, leaving = WRAPPERS[name], Leaving()
    kind = Product if backend is None else (PRODUCTS | IN_PLACE)[product_name]
    with use_backend(backend or CpuBackend(), config=CONFIG) as manager:
        product = kind(manager.backend)
        torch.manual_seed(1)
        model = wrapper.wrap(product.inside(Stage()))
        product.outside(model)
        product.listen(leaving)
        for module in model.modules():
            module.register_forward_pre_hook(Leaving.note)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[Tensor] = []
        for step in range(3):
            product.begin_step()
            waiting: list[Tensor] = []
            for number, x in enumerate(draw(step)):
                is_last = number == NUM_MICROBATCHES - 1
                with not_synced(model, wrapper.syncs_each or is_last):
                    with product.forward():
                        waiting.append(model(x).square().mean())
                    while len(waiting) >= (1 if is_last else wrapper.num_in_flight):
                        waiting[0].backward()
                        seen.append(waiting.pop(0).detach())
            optimizer.step()
            seen += gradients(model)
            seen += [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]
        return seen, {} if backend is None else leaving.facts(product)


def not_synced(model: nn.Module, syncs: bool) -> AbstractContextManager[Any]:
    """What each wrapper has for microbatches whose gradients stay on their rank."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(syncs)
    elif isinstance(model, DistributedDataParallel) and not syncs:
        return model.no_sync()
    return nullcontext()


# Stages of a pipeline


class Untold(nn.Linear):
    """Uses a weight first so that autograd does not see whose it is."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.detach().t()) @ self.weight


def sharded_stage(mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Every layer and its mlp sharded, then the rest."""
    stage = Stage()
    for layer in stage.layers:
        layer.mlp.append(Untold(WIDTH, WIDTH, bias=False))
        fully_shard(layer.mlp, mesh=mesh, **options)
    return sharded(stage, mesh, **options)


STAGES: dict[str, Callable[..., nn.Module]] = {
    "plain": lambda mesh: Stage(),
    "ddp": lambda mesh: ddp(Stage(), process_group=mesh.get_group()),
    "fsdp2": sharded_stage,
    "fsdp2, bf16": partial(sharded_stage, mp_policy=BF16),
    "fsdp2, kept": partial(sharded_stage, reshard_after_forward=False),
}
"""With groups. Other kinds are a product's name; each stage is given that product."""

WINDOW_BYTES = 1536
"""Twice what a group saves."""


def make_schedule(name: str, stages: list[PipelineStage], num: int, **options: Any) -> Any:
    """A schedule over this rank's stages; ``csv`` is one that a file gives."""
    if name in ONE_STAGE:
        return ONE_STAGE[name](stages[0], num, **options)
    if name != "csv":
        return (LOOPED | V_SHAPED)[name](stages, num, **options)
    file = Path(sys.argv[1], f"{dist.get_rank()}.csv")
    named = make_schedule("interleavedzerobubble", stages, num, **options)
    named._dump_csv(str(file), format="compute_only")
    schedule = _PipelineScheduleRuntime(stages, num, **options)
    schedule._load_csv(str(file))
    return schedule


def stage(
    backend: Backend | None, kind: str, name: str, virtual: str = "2", policy: str = "reload"
) -> Trained:
    """Three steps of a schedule, with an eval between plain ones; losses and this rank's gradients.

    Plain stages are on all ranks. Other pipelines have one rank where stages are replicated over
    two ranks, else two; if there are four ranks, there are two pipelines.
    """
    world, leaving = dist.get_world_size(), Leaving()
    num_ranks = 1 if kind in STAGES and world == 2 else 2
    num_ranks = world if kind == "plain" else num_ranks
    mesh = init_device_mesh("cpu", (num_ranks, world // num_ranks), mesh_dim_names=("pp", "dp"))
    rank, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    indices = [rank + num_ranks * v for v in range(1 if name in ONE_STAGE else int(virtual))]
    if name in V_SHAPED:  # the first rank has the first and the last
        indices = [rank, 2 * num_ranks - 1 - rank]
    num_stages, num = num_ranks * len(indices), max(NUM_MICROBATCHES, 2 * num_ranks)
    products: list[Any] = []

    def make(index: int) -> nn.Module:
        torch.manual_seed(index)
        if kind in STAGES:
            made = STAGES[kind](mesh["dp"])
            for module in made.modules():
                module.register_forward_pre_hook(Leaving.note)
            return made
        if backend is None:
            return Stage()
        product = PRODUCTS[kind](backend)
        products.append(product)
        made = product.inside(Stage())
        if kind == "context":
            made.forward = product.offload(made.forward)  # type: ignore[method-assign]
        return made

    config = replace(CONFIG, prefetch_bytes=WINDOW_BYTES, split_backward=policy)
    with use_backend(backend or CpuBackend(), config=config) as manager:
        manager.offloader.observers.add(leaving)
        modules = {index: make(index) for index in indices}
        cpu, options = torch.device("cpu"), {"loss_fn": nn.functional.mse_loss}
        stages = [PipelineStage(m, i, num_stages, cpu, group=group) for i, m in modules.items()]
        schedule = make_schedule(name, stages, num, **options, scale_grads=policy == "reload")
        groups = {"mlp": "layers.*.mlp"} if kind in STAGES else None
        seen: list[Tensor] = []
        steps = []
        with attach(schedule, groups) if backend is not None and groups else nullcontext():
            for step in range(3):
                x, losses = torch.cat(draw(step, num)), list[Tensor]()
                inputs = [x] if 0 in modules else []
                on_the_last = {"target": x, "losses": losses} if num_stages - 1 in modules else {}
                schedule.step(*inputs, **on_the_last)
                seen += [*(loss.detach() for loss in losses), *gradients(*modules.values())]
                # PyTorch's own eval of a V fails, with and without offload
                if kind == "plain" and name not in V_SHAPED:
                    schedule.eval(*inputs, **on_the_last)
                    seen += losses
                manager.backend.synchronize()
                steps.append(manager.statistics())
            manager.reset()
        table = summary_table()
        return seen, {**leaving.facts(manager, *products), "steps": steps, "table": table}


# A group that saves what collectives made


def tensor_parallel(is_on: bool, step: int) -> list[Tensor]:
    """DTensors whose local tensors come from collectives."""
    mesh = init_device_mesh("cpu", (2,))
    x, y = (DTensor.from_local(t, mesh, [Shard(0)]).requires_grad_() for t in draw(step, 2))

    def compute(h: DTensor) -> DTensor:
        gathered = h.redistribute(mesh, [Replicate()])
        z = (gathered * y.redistribute(mesh, [Replicate()])).sin() @ gathered.t()
        return z.redistribute(mesh, [Shard(1)]).exp()

    z = group(x * 1, compute, is_on)
    z.sum().full_tensor().backward()
    return [z.to_local().detach(), x.grad.to_local(), y.grad.to_local()]


def collective(backend: Backend | None) -> Trained:
    """Three steps of a group."""
    seen: list[Tensor] = []
    with use_backend(backend or CpuBackend(), config=CONFIG) as manager:
        for step in range(3):
            begin_step()
            seen += tensor_parallel(backend is not None, step)
        return seen, Leaving().facts(manager)


RUNS: dict[str, Callable[..., Trained]]
RUNS = {"replica": replica, "stage": stage, "collective": collective}


def compare(case: str) -> dict[str, list[Any]]:
    """Facts of a run on each of two backends, by name, and whether its bits are as without."""
    kind, *names = case.split("/")
    expected, _ = RUNS[kind](None, *names)
    facts: dict[str, list[Any]] = {}
    for backend in (CpuBackend(), SimulatedBackend("late")):
        got, others = RUNS[kind](backend, *names)
        is_equal = len(got) == len(expected) > 0 and all(map(torch.equal, got, expected))
        for name, fact in {"equal": is_equal, **others}.items():
            facts.setdefault(name, []).append(fact)
    PipelineOffloadManager.reset_instance()  # before the process group goes
    return facts


if __name__ == "__main__":
    run_cases(compare)
