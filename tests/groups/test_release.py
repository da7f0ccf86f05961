"""Forced release empties what was copied and nobody else needs, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import make_backend, on_two_backends
from helpers.toy import same_bits
from torch import Tensor
from torch.nn import Parameter

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend

Before = Callable[[PipelineOffloadManager, Tensor], object]


def run(
    manager: PipelineOffloadManager,
    *,
    is_on: bool,
    is_leaf: bool,
    before: Before = lambda manager, x: None,
    min_numel: int = 1,
    make: Callable[[Tensor], Tensor] = lambda x: x,
) -> tuple[int, list[Tensor]]:
    """Bytes of the group's input after the commit and its copy, and the gradients."""
    torch.manual_seed(5)
    device = manager.backend.device
    leaf = make(torch.randn(40).to(device).requires_grad_())
    weight = torch.randn(40).to(device).requires_grad_()
    if is_on:
        manager.reset()
        manager.init_model_chunk_offload_handler(None, None, min_numel)
    x = leaf if is_leaf else leaf * 2
    other = before(manager, x)
    with off_interface(is_on, x, "g"):
        y = x * weight
    if is_on:
        y = off_interface.group_commit(y, name="g", forced_released_tensors=[x])
        manager.backend.synchronize()
        manager.statistics()
    nbytes = x.untyped_storage().nbytes()
    loss = y.sum() + (other.sum() if isinstance(other, Tensor) else 0)
    loss.backward()
    return nbytes, [weight.grad, leaf.grad]  # type: ignore[list-item]


@on_two_backends
@pytest.mark.parametrize("is_leaf", [True, False], ids=["leaf", "output"])
def test_what_nobody_else_needs_is_emptied(manager: PipelineOffloadManager, is_leaf: bool) -> None:
    nbytes, got = run(manager, is_on=True, is_leaf=is_leaf)
    assert nbytes == 0
    assert same_bits(got, run(manager, is_on=False, is_leaf=is_leaf)[1])


def saved_outside(manager: PipelineOffloadManager, x: Tensor) -> Tensor:
    return x * torch.ones_like(x, requires_grad=True)


def a_view(manager: PipelineOffloadManager, x: Tensor) -> Tensor:
    return x.view(4, 10)


def its_storage(manager: PipelineOffloadManager, x: Tensor) -> Any:
    return x.untyped_storage()


def disabled(manager: PipelineOffloadManager, x: Tensor) -> None:
    manager.disable_offload()


def saved_in_the_manager(manager: PipelineOffloadManager, x: Tensor) -> Tensor:
    with manager:
        return saved_outside(manager, x)


NEEDS: list[dict[str, Any]] = [
    *({"before": each} for each in (saved_outside, a_view, its_storage, disabled)),
    {"before": saved_in_the_manager},
    {"min_numel": 41},
    {"make": Parameter},
]


@pytest.mark.field("F09")
@on_two_backends
@pytest.mark.parametrize("is_leaf", [True, False], ids=["leaf", "output"])
@pytest.mark.parametrize(
    "needs", NEEDS, ids=lambda need: getattr(need.get("before"), "__name__", *need)
)
def test_what_others_need_stays(
    manager: PipelineOffloadManager, needs: dict[str, Any], is_leaf: bool
) -> None:
    """Also what is too small to leave, and a parameter."""
    if "make" in needs and not is_leaf:
        pytest.skip("a parameter is a leaf")
    nbytes, got = run(manager, is_on=True, is_leaf=is_leaf, **needs)
    assert nbytes == 160
    assert same_bits(got, run(manager, is_on=False, is_leaf=is_leaf, **needs)[1])


@on_two_backends
def test_a_marked_tensor_that_nothing_has_saved_stays(manager: PipelineOffloadManager) -> None:
    manager.init_model_chunk_offload_handler(None, None, 1)
    x = torch.ones(4, 10, device=manager.backend.device, requires_grad=True)
    marked = x.detach() * 2
    manager.mark_not_offloadable(marked)
    with off_interface(True, x * 3, "g") as h:
        y = h.sin()
    off_interface.group_commit(y, name="g", forced_released_tensors=[marked])
    manager.backend.synchronize()
    manager.statistics()
    assert marked.untyped_storage().nbytes() == 160


@on_two_backends
@pytest.mark.parametrize("holder", ["nobody", "user", "autograd"])
def test_a_view_is_emptied_if_nobody_needs_its_base(
    manager: PipelineOffloadManager, holder: str
) -> None:
    """The base shares the storage through the view, without being counted among its holders."""
    leaf = torch.linspace(-1, 1, 40).to(manager.backend.device).requires_grad_()
    weight = torch.ones(40).to(leaf.device).requires_grad_()
    manager.reset()
    manager.init_model_chunk_offload_handler(None, None, 1)
    base = leaf.view(4, 10) * 2
    x = base.view(40)
    other = base * weight.view(4, 10) if holder == "autograd" else None
    held = base if holder == "user" else None
    del base
    with off_interface(True, x, "g"):
        y = x * weight
    y = off_interface.group_commit(y, name="g", forced_released_tensors=[x])
    manager.backend.synchronize()
    manager.statistics()
    assert x.untyped_storage().nbytes() == (0 if holder == "nobody" else 160)
    if held is not None:
        assert same_bits([held.detach().view(40)], [leaf.detach() * 2])
    loss = y.sum() if other is None else y.sum() + other.sum()
    (gradient,) = torch.autograd.grad(loss, weight)
    assert same_bits([gradient], [leaf.detach() * (2 if other is None else 4)])


@on_two_backends
@pytest.mark.parametrize("is_needed", [True, False], ids=["a sibling in use", "nobody else"])
def test_a_view_of_what_was_changed_in_place(
    manager: PipelineOffloadManager, is_needed: bool
) -> None:
    """Its graph cannot be made anew, and PyTorch raises whenever it is asked for that."""
    leaf = torch.randn(40).to(manager.backend.device).requires_grad_()
    manager.reset()
    manager.init_model_chunk_offload_handler(None, None, 1)
    with off_interface(True, leaf * 2, "g") as x:
        y = x.sin()
        named, sibling = (x * 2).chunk(2)
        with torch.no_grad():
            sibling.add_(1)
        reference = sibling if is_needed else None
        del sibling
    y = off_interface.group_commit(y, name="g", forced_released_tensors=[named])
    manager.backend.synchronize()
    manager.statistics()
    assert (named.untyped_storage().nbytes() > 0) is (reference is not None)
    y.sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, (leaf.detach() * 2).cos() * 2)


def test_what_compute_waits_for_is_emptied() -> None:
    """Above ``max_in_flight_bytes``, where the host runs ahead of the copies."""
    config = OffloadConfig(min_offloaded_tensor_size=1, max_in_flight_bytes=1)
    with use_backend(make_backend("late"), config=config) as manager:
        manager.init_model_chunk_offload_handler(None, None, 1)
        weight = torch.randn(40, requires_grad=True)
        first = weight * 2
        with off_interface(True, first, "first"):
            second = first * weight
        second = off_interface.group_commit(second, name="first", forced_released_tensors=[first])
        assert first.untyped_storage().nbytes() > 0, "the copy has still to run"
        with off_interface(True, second, "second"):
            loss = (second * weight).sum()
        loss = off_interface.group_commit(loss, name="second")
        assert first.untyped_storage().nbytes() == 0
        loss.backward()
        assert weight.grad is not None
        other = weight.detach().requires_grad_()
        (other * 2 * other * other).sum().backward()
        assert same_bits([weight.grad], [other.grad])  # type: ignore[list-item]
