"""Forced release empties what was copied and nobody else needs, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import on_two_backends
from helpers.sessions import assert_same, begin_step, gradients, settle
from torch import Tensor
from torch.nn import Parameter

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager

NBYTES = 160


def leaf_on(manager: PipelineOffloadManager) -> Tensor:
    return torch.linspace(-1, 1, 40).to(manager.backend.device).requires_grad_()


def saved_in(manager: Any, x: Tensor) -> Tensor:
    with manager:
        return x * torch.ones_like(x, requires_grad=True)


NEEDS: dict[str, Callable[[Any, Tensor], Any]] = {
    "nobody": lambda manager, x: None,
    "parameter": lambda manager, x: None,
    "saved outside": lambda manager, x: saved_in(nullcontext(), x),
    "saved in the manager": saved_in,
    "view": lambda manager, x: x.view(4, 10),
    "storage": lambda manager, x: x.untyped_storage(),
    "offload disabled": lambda manager, x: manager.disable_offload(),
    "too small": lambda manager, x: manager.init_model_chunk_offload_handler(None, None, 41),
}
"""Who needs a tensor besides its group, or why it does not leave."""


@pytest.mark.field("F09")
@on_two_backends
@pytest.mark.parametrize("is_leaf", [True, False], ids=["leaf", "output"])
@pytest.mark.parametrize("who", NEEDS)
def test_what_others_need_stays(manager: PipelineOffloadManager, who: str, is_leaf: bool) -> None:
    results = []
    for is_on in (False, True):
        begin_step()
        leaf, weight = leaf_on(manager), leaf_on(manager)
        if who == "parameter":
            leaf = Parameter(leaf)
        x = leaf if is_leaf or who == "parameter" else leaf * 2
        other = NEEDS[who](manager, x)
        with off_interface(is_on, x, "g"):
            y = x * weight
        if is_on:
            y = off_interface.group_commit(y, name="g", forced_released_tensors=[x])
            settle(manager)
            assert x.untyped_storage().nbytes() == (0 if who == "nobody" else NBYTES)
        (y.sum() + (other.sum() if isinstance(other, Tensor) else 0)).backward()
        results.append(gradients(weight, leaf))
    assert_same(*results)


@on_two_backends
def test_a_marked_tensor_that_nothing_has_saved_stays(manager: PipelineOffloadManager) -> None:
    begin_step()
    x = leaf_on(manager)
    marked = x.detach() * 2
    manager.mark_not_offloadable(marked)
    with off_interface(True, x * 3, "g") as h:
        y = h.sin()
    off_interface.group_commit(y, name="g", forced_released_tensors=[marked])
    settle(manager)
    assert marked.untyped_storage().nbytes() == NBYTES


@on_two_backends
@pytest.mark.parametrize("holder", ["nobody", "user", "autograd"])
def test_a_view_is_emptied_if_nobody_needs_its_base(
    manager: PipelineOffloadManager, holder: str
) -> None:
    """The base shares the storage through the view, without being counted among its holders."""
    begin_step()
    leaf = leaf_on(manager)
    weight = torch.ones_like(leaf).requires_grad_()
    base = leaf.view(4, 10) * 2
    x = base.view(40)
    other = base * weight.view(4, 10) if holder == "autograd" else torch.zeros_like(leaf)
    held = base if holder == "user" else None
    del base
    with off_interface(True, x, "g"):
        y = x * weight
    y = off_interface.group_commit(y, name="g", forced_released_tensors=[x])
    settle(manager)
    assert x.untyped_storage().nbytes() == (0 if holder == "nobody" else NBYTES)
    if held is not None:
        assert_same([held.view(40)], [leaf * 2])
    (gradient,) = torch.autograd.grad(y.sum() + other.sum(), weight)
    assert_same([gradient], [leaf * (4 if holder == "autograd" else 2)])
