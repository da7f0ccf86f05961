"""F18: a step that was aborted leaves nothing behind, and the next one is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from field_checks import Chain, make_inputs, run_moves, schedule
from torch import Tensor
from toy import assert_idle, assert_no_hooks, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager

pytestmark = pytest.mark.field("F18")


class Boom(Exception):
    """What goes wrong."""


def boom(*args: object, **kwargs: object) -> Any:
    raise Boom


class FailsInBackward(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Boom


def in_the_group_body(model: Chain, x: Tensor, manager: PipelineOffloadManager) -> None:
    h = model(x)
    with off_interface(True, h, "a") as h:
        h.sin()
        boom()


def between_start_and_commit(model: Chain, x: Tensor, manager: PipelineOffloadManager) -> None:
    h = model(x)
    with off_interface(True, h, "a") as h:
        h.sin()
    boom()


def in_the_managers_scope(model: Chain, x: Tensor, manager: PipelineOffloadManager) -> None:
    with manager, manager:
        model(x)
        boom()


def in_pack(model: Chain, x: Tensor, manager: PipelineOffloadManager) -> None:
    eligibility = manager.offloader.engine.eligibility
    h = model(x)
    eligibility.admits = boom  # type: ignore[method-assign]
    try:
        model(h)
    finally:
        del eligibility.admits


def in_the_copy(model: Chain, x: Tensor, manager: PipelineOffloadManager) -> None:
    manager.backend.copy = boom  # type: ignore[method-assign]
    try:
        model(x)
    finally:
        del manager.backend.copy


def in_backward(model: Chain, x: Tensor, manager: PipelineOffloadManager) -> None:
    model(FailsInBackward.apply(model(x))).sum().backward()


def dropped_forward(model: Chain, x: Tensor, manager: PipelineOffloadManager) -> None:
    model(x)
    raise Boom


def dropped_graph_of_two(model: Chain, x: Tensor, manager: PipelineOffloadManager) -> None:
    first = model(x)
    off_interface.init_chunk_handler(None, None, 1)
    second = model(x)
    second.sum().backward()
    del first
    raise Boom


FAILURES = [
    in_the_group_body,
    between_start_and_commit,
    in_the_managers_scope,
    in_pack,
    in_the_copy,
    in_backward,
    dropped_forward,
    dropped_graph_of_two,
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("fails", FAILURES)
@pytest.mark.parametrize("num_before", [0, 2])
def test_aborted_step(
    manager: PipelineOffloadManager,
    fails: Callable[[Chain, Tensor, PipelineOffloadManager], None],
    num_before: int,
) -> None:
    device = manager.backend.device
    on, off = (Chain(("a", "b"), 2, is_on=b, device=device) for b in (True, False))
    moves = schedule(3, 2)

    def right_step(step: int) -> None:
        inputs = make_inputs(3, step=step, device=device)
        expected = run_moves([off], inputs, moves, False)
        assert same_bits(run_moves([on], inputs, moves, True), expected)
        assert_idle(manager)

    for step in range(num_before):
        right_step(step)
    for _ in range(2):
        off_interface.reset()
        off_interface.init_chunk_handler(None, None, 1)
        was_raised = False
        try:
            fails(on, make_inputs(1, device=device)[0].requires_grad_(), manager)
        except Boom:
            was_raised = True
        assert was_raised
        assert_no_hooks()
        on.zero_grad()
    off_interface.reset()
    assert_idle(manager)
    for step in range(2, 5):
        right_step(step)


@pytest.mark.parametrize("fails", FAILURES)
def test_aborted_step_is_not_the_first(
    manager: PipelineOffloadManager,
    fails: Callable[[Chain, Tensor, PipelineOffloadManager], None],
) -> None:
    model = Chain(("a", "b"), 2, device=manager.backend.device)
    (x,) = make_inputs(1, device=manager.backend.device)
    off_interface.reset()
    off_interface.init_chunk_handler(None, None, 1)
    with pytest.raises(Boom):
        fails(model, x.requires_grad_(), manager)
    off_interface.reset()
    assert not manager.offloader.plan.kept
    assert manager.step.is_warmup
