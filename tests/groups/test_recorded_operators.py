"""Where operators are recorded as a graph, or stand for others, what is saved stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from conftest import BEFORE_2_13, on_two_backends
from helpers.sessions import begin_microbatch, begin_step, drawn, group, session
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pp_offload import OffloadActivations, checkpoint
from pp_offload.backends import Backend

Function = Callable[[Tensor], Tensor]

WIDTH = 40


def compute(x: Tensor) -> Tensor:
    """Saves some tensors, of which none is another's view."""
    return torch.tanh(x @ x.t()) * x.sin().sum(1)


def plain(x: Tensor) -> Tensor:
    return compute(compute(x))


def inputs(backend: Backend, seed: int) -> Tensor:
    return drawn(WIDTH, WIDTH, seed=seed).to(backend.device)


def gradient(run: Function, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(run(x).sum(), x)[0]


@pytest.fixture(params=["groups", "context", "checkpoint"])
def run(request: pytest.FixtureRequest, backend: Backend) -> Iterator[Function]:
    """A program with offload. Behind the test, a step of it is offloaded as ever."""
    with session(backend) as manager:
        context = OffloadActivations(min_offload_size=1, max_fwd_stash_size=1, backend=backend)

        def run(x: Tensor) -> Tensor:
            if request.param == "groups":
                return group(group(x, compute, name="a"), compute, name="b")  # type: ignore[no-any-return]
            if request.param == "context":
                with context:
                    return plain(x)
            for _ in range(2):
                x = checkpoint(compute, x, offload_inputs=True)
            return x

        begin_microbatch()
        yield run
        begin_step()
        x = inputs(backend, 2)
        assert torch.equal(gradient(run, x), gradient(plain, x))
        manager.reset()
        assert manager.statistics().live_tensors == context.statistics().live_tensors == 0


@on_two_backends
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_recorded_step_is_right_for_other_inputs(
    backend: Backend, run: Function, mode: str
) -> None:
    recorded = make_fx(lambda x: gradient(run, x), tracing_mode=mode)(inputs(backend, 0))
    other = inputs(backend, 1)
    assert torch.equal(recorded(other), gradient(plain, other))


@on_two_backends
def test_a_forward_recorded_early_has_no_copies(backend: Backend, run: Function) -> None:
    """As ``torch.export`` records one, above autograd."""
    recorded = make_fx(run, pre_dispatch=True)(inputs(backend, 0).requires_grad_())
    assert not [node for node in recorded.graph.nodes if "copy" in str(node.target)]
    other = inputs(backend, 1)
    assert torch.equal(recorded(other), plain(other))


@on_two_backends
def test_a_transformed_step_is_right(
    backend: Backend, run: Function, request: pytest.FixtureRequest
) -> None:
    if BEFORE_2_13 and "checkpoint" in request.node.callspec.params.values():
        pytest.skip("PyTorch's checkpoints refuse it before torch 2.13")
    x = inputs(backend, 0)[:4, :4].contiguous().requires_grad_()
    assert torch.equal(torch.func.jacfwd(run)(x), torch.func.jacfwd(plain)(x))
