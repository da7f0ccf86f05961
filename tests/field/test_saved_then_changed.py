"""F03: a saved tensor changed in place never gives wrong gradients silently."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from toy import assert_idle, assert_no_hooks, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager, RaceError, SavedTensorModifiedError

pytestmark = pytest.mark.field("F03")

CHANGES: dict[str, Callable[[Tensor], object]] = {
    "add": lambda t: t.add_(1),
    "mul": lambda t: t.mul_(3),
    "relu": lambda t: t.relu_(),
}
changes = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


def nothing(*tensors: Tensor) -> None:
    """Change nothing."""


def gradient(
    manager: PipelineOffloadManager | None,
    *,
    before: Callable[[Tensor], object] = nothing,
    inside: Callable[[Tensor], object] = nothing,
    between: Callable[[Tensor], object] = nothing,
    after: Callable[[Tensor], object] = nothing,
    other: Callable[[Tensor], object] = nothing,
    device: object = "cpu",
) -> list[Tensor]:
    """The gradient of sin(2 x), whose input is changed at one of five times."""
    if manager is not None:
        manager.reset()
        manager.init_model_chunk_offload_handler(None, None, 1)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 5, generator=generator).to(str(device)).requires_grad_()
    is_on = manager is not None
    h = x * 2
    before(h)
    with off_interface(is_on, h, "core") as marked:
        y = marked.sin()
        inside(h)
    between(h)
    if is_on:
        y = off_interface.group_commit(y, name="core")
    z = y * 1.5
    other(z)
    after(h)
    z.sum().backward()
    assert x.grad is not None
    return [z.detach(), x.grad]


@changes
@pytest.mark.parametrize("when", ["inside", "between"])
def test_changed_before_commit_raises(
    manager: PipelineOffloadManager, change: Callable[[Tensor], object], when: str
) -> None:
    device = manager.backend.device
    with pytest.raises(RuntimeError, match="inplace"):
        gradient(None, device=device, **{when: change})
    with pytest.raises(SavedTensorModifiedError, match=r"(?s)\(3, 5\).*core|core.*\(3, 5\)"):
        gradient(manager, device=device, **{when: change})
    assert_no_hooks()
    expected = gradient(None, device=device)
    assert same_bits(gradient(manager, device=device), expected)
    assert_idle(manager)


@changes
def test_changed_while_the_copy_is_queued(
    manager: PipelineOffloadManager, change: Callable[[Tensor], object]
) -> None:
    """It raises, or the value at save is used; which one depends on when the copy ran."""
    backend, device = manager.backend, manager.backend.device

    def unseen(h: Tensor) -> None:
        # The simulated device would report the race itself; here the engine alone must notice.
        with getattr(backend, "_inside", nullcontext)():
            change(h)

    try:
        got = gradient(manager, device=device, after=unseen)
    except SavedTensorModifiedError as error:
        assert "core" in str(error)
        assert "3, 5" in str(error)
    else:
        assert getattr(backend, "order", "") != "late"
        assert same_bits(got, gradient(None, device=device))
    assert same_bits(gradient(manager, device=device), gradient(None, device=device))
    assert_idle(manager)


@changes
def test_changed_when_it_harms_nobody(
    manager: PipelineOffloadManager, change: Callable[[Tensor], object]
) -> None:
    device = manager.backend.device

    def after_the_copy(h: Tensor) -> None:
        manager.backend.synchronize()
        manager.statistics()
        change(h)

    assert same_bits(
        gradient(manager, device=device, after=after_the_copy), gradient(None, device=device)
    )
    assert_idle(manager)
    for when in ("before", "other"):
        assert same_bits(
            gradient(manager, device=device, **{when: change}),
            gradient(None, device=device, **{when: change}),
        )
        assert_idle(manager)


def test_a_neighbour_in_the_same_buffer_is_not_blamed(manager: PipelineOffloadManager) -> None:
    """Small tensors share a host buffer; one of them changed too early says nothing of others."""
    backend, device = manager.backend, manager.backend.device
    manager.reset()
    manager.init_model_chunk_offload_handler(None, None, 1)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2, 3, 5, generator=generator).to(device).requires_grad_()
    changed, neighbour = x[0] * 2, x[1] * 2
    with off_interface(True, x, "core"):
        first, second = changed.sin(), neighbour.sin()
    first, second = off_interface.group_commit((first, second), name="core")
    with getattr(backend, "_inside", nullcontext)():
        changed.add_(1)
    (gradient,) = torch.autograd.grad(second.sum(), x, retain_graph=True)
    plain = (x[1] * 2).sin().sum()
    assert same_bits([gradient], list(torch.autograd.grad(plain, x)))
    if getattr(backend, "order", "") == "late":
        with pytest.raises(SavedTensorModifiedError):
            first.sum().backward()


class UsesSavedAsScratch(torch.autograd.Function):
    """A backward that changes what was saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.mul_(3).mul_(grad)


@pytest.mark.parametrize("is_view", [False, True], ids=["same", "views"])
def test_changed_by_another_backward(manager: PipelineOffloadManager, is_view: bool) -> None:
    """The tensor is saved twice; the first to use it in backward changes it.

    It raises, or the second gets the value at save, if the host had that already.
    """
    device = manager.backend.device

    def backward(is_on: bool, *, is_apart: bool = False) -> Tensor:
        if is_on:
            manager.reset()
            manager.init_model_chunk_offload_handler(None, None, 1)
        w = torch.ones(4, 5).to(device).requires_grad_()
        h = torch.ones(4, 5).to(device).requires_grad_() * 1.5
        with off_interface(is_on, h, "core"):
            a = h * w
            scratch = h.clone() if is_apart else h
            b = UsesSavedAsScratch.apply(scratch.t() if is_view else scratch)
            y = a + (b.t() if is_view else b)
        if is_on:
            y = off_interface.group_commit(y, name="core")
        y.sum().backward()
        assert w.grad is not None
        return w.grad

    with pytest.raises(RuntimeError, match="inplace"):
        backward(is_on=False)
    try:
        got = backward(is_on=True)
    except (SavedTensorModifiedError, RaceError) as error:
        assert "core" in str(error)
    else:
        assert same_bits([got], [backward(is_on=False, is_apart=True)])
    assert same_bits(gradient(manager, device=device), gradient(None, device=device))
