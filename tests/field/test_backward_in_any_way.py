"""Saved tensors live as long as autograd needs them: F06, F16, F17, F20, F29, F43, F49, F50."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from conftest import NO_SPARSE, on_two_backends, skip_on_emulated
from helpers.scenarios import (
    Chain,
    Compute,
    begin,
    check_steps,
    make_inputs,
)
from helpers.sessions import group
from helpers.toy import assert_idle, same_bits
from torch import Tensor

from pp_offload import OffloadActivations, PipelineOffloadManager
from pp_offload.backends import Backend

# F16 and F29: a backward of any kind, of groups or in the context


@pytest.mark.field("F29")
@on_two_backends
def test_in_the_context_each_microbatch_in_flight_is_on_the_host(
    activations: OffloadActivations, backend: Backend
) -> None:
    """But for what is kept of the last, whose backward comes next."""
    chain = Chain("a", 3, is_on=False, device=backend.device)
    held, losses = [0], []
    for x in make_inputs(3, device=backend.device):
        with activations:
            losses.append(chain(x.requires_grad_()).square().mean())
        held.append(activations.statistics().host_bytes_in_use)
    grown = [after - before for before, after in zip(held, held[1:], strict=False)]
    assert grown[0] > 0
    assert all(more > grown[0] for more in grown[1:]), "each sends what the one before it kept"
    losses.clear()
    assert_idle(activations)


# F50: what PyTorch promises of hooks


class Token:
    """Something to refer to weakly."""


@pytest.fixture
def x(manager: PipelineOffloadManager) -> Iterator[Tensor]:
    """An input of a microbatch that has begun."""
    begin()
    yield make_inputs(1, device=manager.backend.device)[0].requires_grad_()


@pytest.mark.field("F50")
@on_two_backends
def test_saved_tensors_are_read_outside_backward(
    manager: PipelineOffloadManager, x: Tensor
) -> None:
    """An input, a leaf and an output, which does not keep its node alive by a cycle."""
    h = x * 2
    y = group(h, torch.sin)
    node = y.grad_fn
    assert same_bits([node._saved_self.detach()], [h.detach()])
    assert node._saved_self.requires_grad and node._saved_self.grad_fn is h.grad_fn
    y.sum().backward()
    assert same_bits([x.grad], [2 * (x.detach() * 2).cos()])
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        _ = node._saved_self
    assert group(x, torch.sin).grad_fn._saved_self.is_leaf
    y = group(x * 2, torch.exp)
    saved = y.grad_fn._saved_result
    assert saved is not y and saved.grad_fn is y.grad_fn
    assert same_bits([saved.detach()], [y.detach()])
    token = Token()
    y.grad_fn.metadata["token"] = token  # lives as long as the node
    alive = weakref.ref(token)
    gc.disable()
    try:
        del y, saved, token, node
        assert alive() is None
    finally:
        gc.enable()
    assert_idle(manager)


def of_sparse(h: Tensor) -> Tensor:
    """Sparse tensors of two layouts are saved; a gradient goes through another."""
    mask = torch.ones(4, 4, device=h.device).tril()
    y = torch.sparse.mm(mask.to_sparse(), h) * torch.sparse.mm(mask.to_sparse_csr(), h.sin())
    return y + torch.sparse.mm((h @ h.t()).to_sparse(), h).sin()


def under_vmap(h: Tensor) -> Tensor:
    return torch.vmap(lambda row: row.sin() * row.exp())(h)


def plainly(h: Tensor) -> Tensor:
    return (h.sin() * h).exp()


@pytest.mark.field("F50")
@on_two_backends
@pytest.mark.parametrize("compute", [of_sparse, under_vmap, plainly])
def test_derivatives_of_any_order(manager: PipelineOffloadManager, compute: Compute) -> None:
    if compute is of_sparse:
        skip_on_emulated(manager.backend, NO_SPARSE)

    def step(is_on: bool, number: int) -> list[Tensor]:
        x = make_inputs(1, step=number, device=manager.backend.device)[0].requires_grad_()
        begin(is_on)
        results = [group(x * 1.5, compute, is_on)]
        for _ in range(3 if compute is plainly else 1):
            results += torch.autograd.grad(results[-1].sum(), x, create_graph=compute is plainly)
        return [result.detach() for result in results]

    check_steps(manager, step)
