"""Tensors made of others: what leaves, what stays, and that a change in place is seen."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives as collectives
from conftest import on_two_backends
from torch import Tensor
from toy import assert_idle, batches, same_bits
from wrapped import WRAPPERS, KeepsSaved, Scaled, begin, in_group, leaves

from pp_offload import PipelineOffloadManager, SavedTensorModifiedError


def inputs(num: int, device: torch.device) -> list[Tensor]:
    return [x.to(device) for x in batches(num, 6, length=4)]


@on_two_backends
@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS)
def test_what_left_is_gone(
    manager: PipelineOffloadManager, make: Callable[[list[Tensor]], Tensor]
) -> None:
    """Nothing of the engine keeps the memory inside a wrapper."""
    x, *others = inputs(5, manager.backend.device)
    begin(manager)
    saved = [make(others)]
    refs = [weakref.ref(leaf.untyped_storage()) for leaf in leaves(saved[0])]
    y = in_group(True, x.requires_grad_() * 1, lambda h: KeepsSaved.apply(h, saved.pop()))
    others.clear()
    manager.backend.synchronize()
    assert manager.statistics().bytes_in_flight == 0
    assert [ref() for ref in refs] == [None] * len(refs)
    del y
    assert_idle(manager)


@on_two_backends
def test_rows_of_several_lengths_stay(manager: PipelineOffloadManager) -> None:
    """A jagged tensor knows its shape by the very tensor of offsets it has."""
    device = manager.backend.device

    def run(is_on: bool) -> list[Tensor]:
        rows = [x[:length] for x, length in zip(inputs(2, device), (2, 4), strict=True)]
        if is_on:
            begin(manager)
        values = torch.cat(rows).requires_grad_()
        offsets = torch.tensor([0, 2, 6], device=device)
        jagged = torch.nested.nested_tensor_from_jagged(values, offsets)
        y = in_group(is_on, jagged * 1, lambda h: h.sin() * h)
        (y * jagged).values().sum().backward()
        return [y.values().detach(), values.grad]

    assert same_bits(run(True), run(False))


@on_two_backends
@pytest.mark.parametrize("smallest", [1, 10])
@pytest.mark.parametrize("when", ["before commit", "after the copy"])
def test_changed_in_place_raises(manager: PipelineOffloadManager, smallest: int, when: str) -> None:
    """As without offload, although no tensor inside counts the change."""

    def run(is_on: bool) -> None:
        x, value = inputs(2, manager.backend.device)
        leaf = x.requires_grad_()
        quantised = Scaled.of(value)

        def compute(h: Tensor) -> Tensor:
            y = leaf * quantised
            if when == "before commit":
                quantised.mul_(2)
            return y

        if is_on:
            begin(manager, smallest)
        y = in_group(is_on, x.detach(), compute)
        if when == "after the copy":
            manager.backend.synchronize()
            quantised.mul_(2)
        y.sum().backward()

    with pytest.raises(RuntimeError, match="inplace"):
        run(False)
    with pytest.raises(SavedTensorModifiedError, match=r"(?s)\(4, 6\).*core"):
        run(True)
    run_after = inputs(1, manager.backend.device)[0].requires_grad_()
    begin(manager)
    in_group(True, run_after * 1, torch.sin).sum().backward()
    assert_idle(manager)


@on_two_backends
@pytest.mark.parametrize("kind", ["quantised", "nested"])
@pytest.mark.parametrize("is_inner", [False, True], ids=["wrapper", "inner tensor"])
def test_changed_through_the_wrapper_between_two_groups(
    manager: PipelineOffloadManager, is_inner: bool, kind: str
) -> None:
    """Inside, no version tells of it; so the second group does not share the copy of the first."""
    device = manager.backend.device

    def run(is_on: bool) -> list[Tensor]:
        (values,) = inputs(1, device)
        x = values.clone().requires_grad_()
        wrapped = WRAPPERS[kind]([row.view(2, 3).clone() for row in values])
        first_values = [t.clone() for t in leaves(wrapped)]
        h = x * 1
        if is_on:
            begin(manager)
        saved = leaves(wrapped)[-1] if is_inner else wrapped
        first = in_group(is_on, h, lambda h: KeepsSaved.apply(h, saved))
        manager.backend.synchronize()
        wrapped.mul_(3)
        assert not same_bits(leaves(wrapped), first_values)
        assert not is_on or manager.statistics().bytes_offloaded > 0
        second = in_group(is_on, h, lambda h: KeepsSaved.apply(h, wrapped))
        second.sum().backward()
        seen = KeepsSaved.seen.pop()
        del first
        return [t.clone() for t in leaves(seen)]

    assert same_bits(run(True), run(False))
    KeepsSaved.seen.clear()


@on_two_backends
@pytest.mark.parametrize("waits_when", ["before", "in the group", "in backward"])
def test_a_collective_leaves_when_somebody_has_waited_for_it(
    manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch, waits_when: str
) -> None:
    """Its result is there when somebody waits, and the operation that saves it does not."""
    device = manager.backend.device
    x, arriving = inputs(2, device)
    begin(manager)
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

    y = in_group(True, x.requires_grad_() * 1, compute)
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
    begin(manager)
    weight = values.clone()
    nbytes = weight.untyped_storage().nbytes()
    leaf = x.requires_grad_()

    def compute(h: Tensor) -> Tensor:
        y = h * weight.view(-1).view_as(weight)
        weight.untyped_storage().resize_(0)
        return y

    y = in_group(True, leaf * 1, compute)
    weight.untyped_storage().resize_(nbytes)
    with torch.autograd._unsafe_preserve_version_counter(weight):
        weight.copy_(values)
    y.sum().backward()
    assert same_bits([leaf.grad], [values])
    assert manager.statistics().bytes_offloaded == 0
