"""Saved tensors that are changed in place: F03, F25."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import on_two_backends
from helpers.scenarios import begin, check_steps, make_inputs, ordered
from helpers.sessions import gradients, unseen
from helpers.toy import assert_idle, assert_no_hooks, same_bits
from torch import Tensor

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    PipelineOffloadManager,
    SavedTensorModifiedError,
    fine_grained_offloading_group_commit,
    fine_grained_offloading_group_start,
)

Change = Callable[[Tensor], object]

CHANGES: dict[str, Change] = {
    "add": lambda t: t.add_(1),
    "relu": lambda t: t.relu_(),
}
changes = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


def sine(manager: PipelineOffloadManager, is_on: bool, **changes: Change) -> list[Tensor]:
    """The gradient of sin(2 x), whose saved input is changed at one of five times."""

    def at(time: str, tensor: Tensor) -> None:
        if time in changes:
            changes[time](tensor)

    if is_on:
        manager.reset()
    begin(is_on)
    x = make_inputs(1, length=3, width=5, device=manager.backend.device)[0].requires_grad_()
    h = x * 2
    at("before", h)
    with off_interface(is_on, h, "core") as marked:
        y = marked.sin()
        at("inside", h)
    at("between", h)
    y = off_interface.group_commit(y, name="core") if is_on else y
    z = y * 1.5
    at("other", z)
    at("after", h)
    z.sum().backward()
    return [z.detach(), *gradients(x)]


@pytest.mark.field("F03")
@on_two_backends
@changes
@pytest.mark.parametrize("when", ["inside", "between"])
def test_changed_before_the_commit_raises(
    manager: PipelineOffloadManager, change: Change, when: str
) -> None:
    with pytest.raises(RuntimeError, match="inplace"):
        sine(manager, False, **{when: change})
    with pytest.raises(SavedTensorModifiedError, match=r"(?s)\(3, 5\).*core|core.*\(3, 5\)"):
        sine(manager, True, **{when: change})
    assert_no_hooks()
    assert same_bits(sine(manager, True), sine(manager, False))
    assert_idle(manager)


@pytest.mark.field("F03")
@ordered
@changes
def test_changed_while_the_copy_is_queued(manager: PipelineOffloadManager, change: Change) -> None:
    """It raises, or the value at save is used; which one depends on when the copy ran."""

    def unnoticed(h: Tensor) -> None:
        with unseen(manager.backend):
            change(h)

    try:
        got = sine(manager, True, after=unnoticed)
    except SavedTensorModifiedError as error:
        assert "core" in str(error) and "3, 5" in str(error)
    else:
        assert getattr(manager.backend, "order", "") != "late"
        assert same_bits(got, sine(manager, False))
    assert same_bits(sine(manager, True), sine(manager, False))
    assert_idle(manager)


OUTPUT_CHANGES: dict[str, Change] = {
    "add": lambda t: t.add_(1),
    "a view": lambda t: t[1:].add_(2),
    "with a gradient": lambda t: t.add_(t.sum()),
}


def in_a_context(is_on: bool, h: Tensor, inside: Change) -> tuple[Tensor, Tensor]:
    with off_interface(is_on, h, "core") as h:
        inside(h)
        y, z = (h * 1.5).sin() * 2, (h * 0.5).tanh() + 1
    return off_interface.group_commit((y, z), name="core") if is_on else (y, z)


def between_functions(is_on: bool, h: Tensor, inside: Change) -> tuple[Tensor, Tensor]:
    with off_interface.get_context(is_on):
        h = fine_grained_offloading_group_start(h, name="core") if is_on else h
        inside(h)
        y, z = (h * 1.5).sin() * 2, (h * 0.5).tanh() + 1
        y = fine_grained_offloading_group_commit(y, name="core") if is_on else y
    return y, z


@pytest.mark.field("F25")
@on_two_backends
@pytest.mark.parametrize("change", OUTPUT_CHANGES.values(), ids=OUTPUT_CHANGES)
@pytest.mark.parametrize("mark", [in_a_context, between_functions])
@pytest.mark.parametrize("when", ["inside", "after"])
def test_the_output_of_a_marker_is_changed(
    manager: PipelineOffloadManager, change: Change, mark: Callable[..., Any], when: str
) -> None:
    """Of the start, or of the commit; and the stream that the groups add to."""

    def step(is_on: bool, number: int) -> list[Tensor]:
        x = make_inputs(1, step=number, device=manager.backend.device)[0].requires_grad_()
        begin(is_on)
        h = x * 2
        for _ in range(2):
            y, z = mark(is_on, h, change if when == "inside" else lambda h: None)
            assert not y._is_view()
            if when == "after":
                change(y)
                change(z)
                h += y * z
            else:
                h = y + z
        h.square().sum().backward()
        return [h.detach(), *gradients(x)]

    check_steps(manager, step, steps=2)
