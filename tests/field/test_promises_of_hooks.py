"""F50: what PyTorch promises of saved-tensor hooks holds under ours, also outside backward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from conftest import NO_SPARSE, skip_on_emulated
from field_checks import make_inputs
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from toy import assert_idle, assert_no_hooks, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager

pytestmark = pytest.mark.field("F50")

Compute = Callable[[Tensor], Tensor]


class Token:
    """Something to refer to weakly."""


def begin(manager: PipelineOffloadManager) -> None:
    manager.reset()
    manager.init_model_chunk_offload_handler(None, None, 1)


def group(h: Tensor, compute: Compute, name: str = "core") -> Tensor:
    with off_interface(True, h, name) as h:
        y = compute(h)
    return off_interface.group_commit(y, name=name)


def test_saved_input_read_outside_backward(manager: PipelineOffloadManager) -> None:
    begin(manager)
    x = make_inputs(1, device=manager.backend.device)[0].requires_grad_()
    h = x * 2
    y = group(h, torch.sin)
    node = y.grad_fn
    for _ in range(3):
        saved = node._saved_self
        assert same_bits([saved.detach()], [h.detach()])
        assert saved.requires_grad and saved.grad_fn is h.grad_fn
    y.sum().backward()
    assert same_bits([x.grad], [2 * (x.detach() * 2).cos()])
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        _ = node._saved_self
    del saved, node, y
    assert_idle(manager)


def test_saved_output_belongs_to_its_node(manager: PipelineOffloadManager) -> None:
    """And does not keep it alive, as a cycle of output and node would."""
    begin(manager)
    x = make_inputs(1, device=manager.backend.device)[0].requires_grad_()
    y = group(x * 2, torch.exp)
    saved = y.grad_fn._saved_result
    assert saved is not y
    assert saved.grad_fn is y.grad_fn
    assert same_bits([saved.detach()], [y.detach()])
    token = Token()
    y.grad_fn.metadata["token"] = token  # lives as long as the node
    alive = weakref.ref(token)
    gc.disable()
    try:
        del y, saved, token
        assert alive() is None
    finally:
        gc.enable()
    assert_idle(manager)


def test_saved_leaf(manager: PipelineOffloadManager) -> None:
    """Gradients of what is unpacked reach the leaf itself."""
    begin(manager)
    x = make_inputs(1, device=manager.backend.device)[0].requires_grad_()
    y = group(x, torch.sin)
    saved = y.grad_fn._saved_self
    assert saved.is_leaf and saved.requires_grad
    assert same_bits([saved.detach()], [x.detach()])
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert same_bits([first.detach(), second], [x.detach().cos(), -x.detach().sin()])


def third_derivative(is_on: bool, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    h = leaf * 1.5
    y = group(h, lambda h: (h.sin() * h).exp()) if is_on else (h.sin() * h).exp()
    results = [y]
    for _ in range(3):
        results += torch.autograd.grad(results[-1].sum(), leaf, create_graph=True)
    return [result.detach() for result in results]


def test_create_graph(manager: PipelineOffloadManager) -> None:
    (x,) = make_inputs(1, device=manager.backend.device)
    expected = third_derivative(False, x)
    for _ in range(3):
        begin(manager)
        assert same_bits(third_derivative(True, x), expected)
    assert manager.statistics().bytes_offloaded > 0
    assert_idle(manager)


@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_gradcheck(manager: PipelineOffloadManager, check: Callable[..., bool]) -> None:
    begin(manager)
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(3, 2).to(manager.backend.device)
    assert check(lambda x: group(x * 1, lambda h: h.sin() * h.exp()), x.requires_grad_())
    assert manager.statistics().bytes_offloaded > 0


def test_forward_over_reverse(manager: PipelineOffloadManager) -> None:
    """Tangents of saved tensors are not lost on the way."""

    def product(is_on: bool) -> list[Tensor]:
        x, direction = make_inputs(2, device=manager.backend.device)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.requires_grad_(), direction)
            h = dual * 2
            y = group(h, lambda h: h.sin() * h) if is_on else h.sin() * h
            (gradient,) = torch.autograd.grad(y.sum(), dual)
            return [t.detach().clone() for t in forward_ad.unpack_dual(gradient)]

    begin(manager)
    got = product(True)
    assert len(got) == 2
    assert same_bits(got, product(False))


def of_sparse(h: Tensor) -> Tensor:
    """Sparse tensors of two layouts are saved."""
    mask = torch.ones(4, 4, device=h.device).tril()
    return torch.sparse.mm(mask.to_sparse(), h) * torch.sparse.mm(mask.to_sparse_csr(), h.sin())


def through_sparse(h: Tensor) -> Tensor:
    """A gradient goes through a sparse tensor."""
    return torch.sparse.mm((h @ h.t()).to_sparse(), h).sin()


def under_vmap(h: Tensor) -> Tensor:
    return torch.vmap(lambda row: row.sin() * row.exp())(h)


@pytest.mark.parametrize("compute", [of_sparse, through_sparse, under_vmap])
def test_tensors_of_other_kinds(manager: PipelineOffloadManager, compute: Compute) -> None:
    if compute in (of_sparse, through_sparse):
        skip_on_emulated(manager.backend, NO_SPARSE)

    def run(is_on: bool, step: int) -> list[Tensor]:
        x = make_inputs(1, step=step, device=manager.backend.device)[0].requires_grad_()
        if is_on:
            begin(manager)
        y = group(x * 2, compute) if is_on else compute(x * 2)
        y.sum().backward()
        return [y.detach(), x.grad]

    for step in range(2):
        assert same_bits(run(True, step), run(False, step))
        assert_idle(manager)
    assert manager.statistics().bytes_offloaded > 0


class Intermediates(torch.autograd.Function):
    """Saves an input, an output and what is neither."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        between = x.cos()
        y = x.sin()
        ctx.save_for_backward(x, between, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, between, y = ctx.saved_tensors
        assert y.grad_fn is not None and not between.requires_grad
        return gradient * between + 0 * y * x


def test_custom_function(manager: PipelineOffloadManager) -> None:
    begin(manager)
    x = make_inputs(1, device=manager.backend.device)[0].requires_grad_()
    h = x * 1
    y = group(h, Intermediates.apply)
    assert [t.requires_grad for t in y.grad_fn.saved_tensors] == [True, False, True]
    y.sum().backward()
    assert same_bits([x.grad], [x.detach().cos()])
    del y, h
    assert_idle(manager)


def test_hooks_that_are_forbidden(manager: PipelineOffloadManager) -> None:
    """The message is that of whoever forbade them, and nothing stays behind."""
    x = make_inputs(1, device=manager.backend.device)[0].requires_grad_()
    begin(manager)
    with disable_saved_tensors_hooks("not in this part"):
        with pytest.raises(RuntimeError, match="not in this part"):
            group(x, torch.sin)
    assert_no_hooks()
    begin(manager)
    group(x * 1, torch.sin).sum().backward()
    assert same_bits([x.grad], [x.detach().cos()])
    assert_idle(manager)


def test_hooks_of_the_saved_variable(manager: PipelineOffloadManager) -> None:
    """Hooks set on one saved tensor are refused in a scope, as under any default hooks."""
    begin(manager)
    x = make_inputs(1, device=manager.backend.device)[0].requires_grad_()
    y = group(x * 1, torch.sin)
    with pytest.raises(RuntimeError, match="hooks"):
        y.grad_fn._raw_saved_self.register_hooks(lambda t: t, lambda t: t)
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        z = (y * 2).sin()
    z.sum().backward()
    assert x.grad is not None
