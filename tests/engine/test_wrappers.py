"""Tensors made of others: what leaves, what stays, and that a change in place is seen."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives as collectives
from conftest import on_two_backends
from helpers.sessions import begin_step, group
from helpers.toy import assert_idle, batches, same_bits
from helpers.wrapped import WRAPPERS, KeepsSaved, leaves
from torch import Tensor

from pp_offload import PipelineOffloadManager


def inputs(num: int, device: torch.device) -> list[Tensor]:
    return [x.to(device) for x in batches(num, 6, length=4)]


@on_two_backends
@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS)
def test_what_left_is_gone(
    manager: PipelineOffloadManager, make: Callable[[list[Tensor]], Tensor]
) -> None:
    """Nothing of the engine keeps the memory inside a wrapper."""
    x, *others = inputs(5, manager.backend.device)
    begin_step()
    saved = [make(others)]
    refs = [weakref.ref(leaf.untyped_storage()) for leaf in leaves(saved[0])]
    y = group(x.requires_grad_() * 1, lambda h: KeepsSaved.apply(h, saved.pop()))
    others.clear()
    manager.backend.synchronize()
    assert manager.statistics().bytes_in_flight == 0
    assert [ref() for ref in refs] == [None] * len(refs)
    del y
    assert_idle(manager)


@on_two_backends
@pytest.mark.parametrize("waits_when", ["before", "in the group", "in backward"])
def test_a_collective_leaves_when_somebody_has_waited_for_it(
    manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch, waits_when: str
) -> None:
    """Its result is there when somebody waits, and the operation that saves it does not."""
    device = manager.backend.device
    x, arriving = inputs(2, device)
    begin_step()
    waits: list[Tensor] = []

    def wait(result: Tensor) -> Tensor:
        if not waits:  # later ones find it there
            result.copy_(arriving)
        waits.append(result)
        return result

    monkeypatch.setattr(collectives, "wait_tensor", wait)
    results = [collectives.AsyncCollectiveTensor(torch.full_like(arriving, torch.nan))]
    if waits_when == "before":
        results[0].trigger_wait()

    def compute(h: Tensor) -> Tensor:
        y = KeepsSaved.apply(h, results[0])
        if waits_when == "in the group":
            results[0].trigger_wait()
        return y

    y = group(x.requires_grad_() * 1, compute)
    assert len(waits) == (waits_when != "in backward"), "the engine never waits"
    is_there = results.pop().completed
    y.sum().backward()
    (seen,) = KeepsSaved.seen
    KeepsSaved.seen.clear()
    assert manager.statistics().bytes_offloaded == (arriving.nbytes if is_there else 0)
    assert same_bits([seen.trigger_wait()], [arriving])


@on_two_backends
def test_emptied_by_its_owner(manager: PipelineOffloadManager) -> None:
    """As FSDP frees a gathered weight after its forward, and fills it again for its backward."""
    device = manager.backend.device
    x, values = inputs(2, device)
    begin_step()
    weight = values.clone()
    nbytes = weight.untyped_storage().nbytes()
    leaf = x.requires_grad_()

    def compute(h: Tensor) -> Tensor:
        y = h * weight.view(-1).view_as(weight)
        weight.untyped_storage().resize_(0)
        return y

    y = group(leaf * 1, compute)
    weight.untyped_storage().resize_(nbytes)
    with torch.autograd._unsafe_preserve_version_counter(weight):
        weight.copy_(values)
    y.sum().backward()
    assert same_bits([leaf.grad], [values])
    assert manager.statistics().bytes_offloaded == 0
