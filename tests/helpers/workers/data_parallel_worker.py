"""One rank of each product in models that are replicated or sharded; for ``test_data_parallel``.

A case is ``wrapper:product``, such as ``ddp:groups``: three steps of four microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from helpers.products import PRODUCTS, Product
from helpers.ranks import run_cases
from helpers.workers.parallel_stage_worker import BF16, Leaving
from helpers.workers.pipeline_worker import Stage
from helpers.workers.steps import NUM_MICROBATCHES, beside, draw, gradients
from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload.backends import Backend, CpuBackend

CONFIG = OffloadConfig(min_offloaded_tensor_size=1)


class Wrapper(NamedTuple):
    """Another model's owner, and when it moves gradients between ranks."""

    wrap: Callable[[nn.Module], nn.Module]

    syncs_each: bool = True
    """After every microbatch; else after the last one of a step."""

    num_in_flight: int = 1


def replicated(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options)


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def with_compiled_parts(model: nn.Module) -> nn.Module:
    """A group around each of these is around the compiled code. Nothing is compiled while a
    simulated device looks at each operation, so this backend computes with the same kernels.
    """
    torch.compiler.reset()
    for layer in model.layers:  # type: ignore[union-attr]
        layer.mlp = torch.compile(layer.mlp, backend="aot_eager")
    return model


WRAPPERS = {
    "ddp": Wrapper(replicated),
    "ddp, accumulated": Wrapper(replicated, syncs_each=False),
    "ddp, static graph": Wrapper(
        lambda model: replicated(model, static_graph=True, gradient_as_bucket_view=True)
    ),
    "ddp, unused": Wrapper(lambda model: replicated(model, find_unused_parameters=True)),
    "ddp, compiled": Wrapper(lambda model: replicated(with_compiled_parts(model))),
    "fsdp2": Wrapper(sharded, num_in_flight=2),
    "fsdp2, accumulated": Wrapper(sharded, syncs_each=False, num_in_flight=2),
    "fsdp2, bf16": Wrapper(lambda model: sharded(model, mp_policy=BF16)),
    "fsdp2, compiled": Wrapper(lambda model: sharded(with_compiled_parts(model))),
    "fsdp2, kept": Wrapper(lambda model: sharded(model, reshard_after_forward=False)),
}


def train(wrapper: Wrapper, product: Product, leaving: Leaving) -> list[Tensor]:
    """Losses, and this rank's gradients and parameters."""
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
    return seen


def not_synced(model: nn.Module, syncs: bool) -> AbstractContextManager[Any]:
    """What each wrapper has for microbatches whose gradients stay on their rank."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(syncs)
    elif isinstance(model, DistributedDataParallel) and not syncs:
        return model.no_sync()
    return nullcontext()


def compare(case: str) -> dict[str, Any]:
    """One case, without and with offload."""
    name, _, kind = case.partition(":")
    wrapper = WRAPPERS[name]
    expected = train(wrapper, Product(CpuBackend()), Leaving())

    def run(backend: Backend) -> tuple[list[Tensor], dict[str, int]]:
        leaving = Leaving()
        with use_backend(backend, config=CONFIG):
            product = PRODUCTS[kind](backend)
            got = train(wrapper, product, leaving)
            statistics = product.statistics()
        return got, {
            "offloaded": statistics.bytes_offloaded,
            "live": statistics.live_tensors,
            "parameters left": leaving.num_whole,
            "left": leaving.num,
        }

    facts = beside(expected, run)
    PipelineOffloadManager.reset_instance()  # before the process group goes
    return facts


if __name__ == "__main__":
    run_cases(compare)
