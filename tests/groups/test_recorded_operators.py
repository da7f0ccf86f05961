"""Where operators are recorded as a graph, or stand for others, what is saved stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import BEFORE_2_13, on_two_backends
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, OffloadConfig, checkpoint, use_backend
from pp_offload._groups.manager import Manager
from pp_offload.backends import Backend

Function = Callable[[Tensor], Tensor]

WIDTH = 40


def compute(x: Tensor) -> Tensor:
    """Saves some tensors, of which none is another's view."""
    return torch.tanh(x @ x.t()) * x.sin().sum(1)


def plain(x: Tensor) -> Tensor:
    return compute(compute(x))


def in_groups(x: Tensor) -> Tensor:
    for name in ("a", "b"):
        with off_interface(True, x, name) as x:
            y = compute(x)
        x = off_interface.group_commit(y, name=name)
    return x


def in_context(x: Tensor) -> Tensor:
    with CONTEXTS[0]:
        return plain(x)


CONTEXTS: list[OffloadActivations] = []


def checkpointed(x: Tensor) -> Tensor:
    for _ in range(2):
        x = checkpoint(compute, x, offload_inputs=True)
    return x


PRODUCTS = {
    "groups": in_groups,
    "context": in_context,
    "checkpoint": checkpointed,
}


@pytest.fixture
def manager(backend: Backend) -> Any:
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with use_backend(backend, config=config) as manager:
        off_interface.init_chunk_handler(None, None, 1)
        context = OffloadActivations(
            min_offload_size=1, max_fwd_stash_size=1, config=config, backend=backend
        )
        CONTEXTS[:] = [context]
        yield manager
        CONTEXTS.clear()


def inputs(backend: Backend, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(WIDTH, WIDTH, generator=generator).to(backend.device)


def gradient(run: Function, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(run(x).sum(), x)[0]


def jacfwd(run: Function, x: Tensor) -> Tensor:
    x = x[:4, :4].detach().contiguous().requires_grad_()
    return torch.func.jacfwd(run)(x)


products = pytest.mark.parametrize("run", PRODUCTS.values(), ids=PRODUCTS)


@on_two_backends
@products
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_recorded_step_is_right_for_other_inputs(
    manager: Manager, backend: Backend, run: Function, mode: str
) -> None:
    recorded = make_fx(lambda x: gradient(run, x), tracing_mode=mode)(inputs(backend, 0))
    other = inputs(backend, 1)
    assert torch.equal(recorded(other), gradient(plain, other))
    assert_a_step_goes_on(manager, backend, run)


@on_two_backends
@products
def test_a_forward_recorded_early_has_no_copies(
    manager: Manager, backend: Backend, run: Function
) -> None:
    """As ``torch.export`` records one, above autograd."""

    recorded = make_fx(run, pre_dispatch=True)(inputs(backend, 0).requires_grad_())
    assert not [node for node in recorded.graph.nodes if "copy" in str(node.target)]
    other = inputs(backend, 1)
    assert torch.equal(recorded(other), plain(other))
    assert_a_step_goes_on(manager, backend, run)


@on_two_backends
@products
def test_a_transformed_step_is_right(manager: Manager, backend: Backend, run: Function) -> None:
    if run is checkpointed and BEFORE_2_13:
        pytest.skip("PyTorch's checkpoints refuse it before torch 2.13")
    x = inputs(backend, 0)
    assert torch.equal(jacfwd(run, x), jacfwd(plain, x))
    assert_a_step_goes_on(manager, backend, run)


def assert_a_step_goes_on(manager: Manager, backend: Backend, run: Function) -> None:
    """What follows is offloaded as ever."""
    off_interface.reset()
    off_interface.init_chunk_handler(None, None, 1)
    x = inputs(backend, 2)
    assert torch.equal(gradient(run, x), gradient(plain, x))
    off_interface.reset()
    assert manager.statistics().live_tensors == 0
    assert CONTEXTS[0].stash.statistics().live_tensors == 0
