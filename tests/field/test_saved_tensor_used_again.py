"""F16: a saved tensor may be used again; its host bytes return when the graph dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from field_checks import Chain, make_inputs
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager

pytestmark = pytest.mark.field("F16")

Backward = Callable[[Chain, Tensor, Tensor], list[Tensor]]


def three_times(model: Chain, x: Tensor, loss: Tensor) -> list[Tensor]:
    for is_last in (False, False, True):
        loss.backward(retain_graph=not is_last)
    return [x.grad, *(w.grad for w in model.weights)]


def input_then_weight(model: Chain, x: Tensor, loss: Tensor) -> list[Tensor]:
    (of_input,) = torch.autograd.grad(loss, x, retain_graph=True)
    return [of_input, *torch.autograd.grad(loss, list(model.weights))]


def double_backward(model: Chain, x: Tensor, loss: Tensor) -> list[Tensor]:
    first = torch.autograd.grad(loss, x, create_graph=True)[0]
    first.square().sum().backward()
    return [first.detach(), x.grad, *(w.grad for w in model.weights)]


def pipelining_parts(model: Chain, x: Tensor, loss: Tensor) -> list[Tensor]:
    of_input, groups = stage_backward_input([loss], None, [x], iter(model.weights))
    stage_backward_weight(iter(model.weights), groups)
    return [of_input[0], *(w.grad for w in model.weights)]


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    "backward", [three_times, input_then_weight, double_backward, pipelining_parts]
)
@pytest.mark.parametrize("in_flight", [2])
def test_second_use(manager: PipelineOffloadManager, backward: Backward, in_flight: int) -> None:
    device = manager.backend.device

    def run(model: Chain, step: int) -> list[Tensor]:
        results: list[Tensor] = []
        if model.is_on:
            off_interface.reset()
        waiting: list[tuple[Tensor, Tensor]] = []

        def go() -> None:
            x, loss = waiting.pop(0)
            results.extend(t.clone() for t in backward(model, x, loss))

        for leaf in make_inputs(4, step=step, device=device):
            if model.is_on:
                off_interface.init_chunk_handler(None, None, 1)
            waiting.append((leaf.requires_grad_(), model(leaf).square().mean()))
            if len(waiting) == in_flight:
                go()
        while waiting:
            go()
        model.zero_grad()
        return results

    on, off = (Chain(("a", "b"), 2, is_on=b, device=device) for b in (True, False))
    for step in range(3):
        assert same_bits(run(on, step), run(off, step)), step
        assert manager.statistics().bytes_offloaded > 0
        # Double backward leaves cycles through .grad; nothing else does.
        assert_idle(manager)


class ReadsTwice(torch.autograd.Function):
    """x squared; backward asks for its saved tensors twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x * 1)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        first, copy = ctx.saved_tensors
        again, copy_again = ctx.saved_tensors
        assert torch.equal(first, again)
        assert torch.equal(copy, copy_again)
        return gradient * (first + again + copy - copy_again)


def test_saved_tensors_read_twice(manager: PipelineOffloadManager) -> None:
    device = manager.backend.device

    def run(is_on: bool, step: int) -> list[Tensor]:
        x = make_inputs(1, step=step, device=device)[0].requires_grad_()
        if is_on:
            manager.reset()
            manager.init_model_chunk_offload_handler(None, None, 1)
        h = x * 2
        with off_interface(is_on, h, "a") as h:
            y = ReadsTwice.apply(h)
        if is_on:
            y = off_interface.group_commit(y, name="a")
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        return [x.grad]

    for step in range(3):
        assert same_bits(run(True, step), run(False, step))
        assert_idle(manager)


def test_bytes_stay_as_long_as_the_graph(manager: PipelineOffloadManager) -> None:
    model = Chain(("a", "b"), 2, device=manager.backend.device)
    manager.reset()
    manager.init_model_chunk_offload_handler(None, None, 1)
    (x,) = make_inputs(1, device=manager.backend.device)
    loss = model(x.requires_grad_()).sum()
    in_use = manager.statistics().host_bytes_in_use
    assert in_use > 0
    loss.backward(retain_graph=True)
    manager.reset()
    assert manager.statistics().host_bytes_in_use == in_use
    assert manager.statistics().bytes_reloaded_unused == 0
    del loss
    assert_idle(manager)
