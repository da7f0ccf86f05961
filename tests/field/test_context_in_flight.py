"""F29: the context with microbatches in flight, a second backward, gradients of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from field_checks import Chain, make_inputs, schedule
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from toy import assert_idle, same_bits

from pp_offload import OffloadActivations
from pp_offload.backends import Backend
from pp_offload.errors import SavedTensorModifiedError

pytestmark = pytest.mark.field("F29")

NUM_MICROBATCHES = 5

Context = AbstractContextManager[object]
Backward = Callable[[Tensor, Tensor], list[Tensor]]
"""Of a loss and its leaf; what it comes to beside the gradients that gather."""


def once(loss: Tensor, leaf: Tensor) -> list[Tensor]:
    loss.backward()
    return []


def twice(loss: Tensor, leaf: Tensor) -> list[Tensor]:
    """The second of them frees what is saved."""
    loss.backward(retain_graph=True)
    loss.backward()
    return []


def retained(loss: Tensor, leaf: Tensor) -> list[Tensor]:
    """Nothing is freed before the loss is."""
    loss.backward(retain_graph=True)
    return []


def of_gradients(loss: Tensor, leaf: Tensor) -> list[Tensor]:
    (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
    first.square().sum().backward()
    return [first.detach()]


def of_gradients_of_gradients(loss: Tensor, leaf: Tensor) -> list[Tensor]:
    (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf, create_graph=True)
    (second.sum() + first.sum() + loss).backward()
    return [first.detach(), second.detach()]


def part_by_part(loss: Tensor, leaf: Tensor) -> list[Tensor]:
    """The gradient of the input, and that of the weights later."""
    (of_input,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    loss.backward(inputs=[leaf])
    return [of_input]


BACKWARDS = [once, twice, retained, of_gradients, of_gradients_of_gradients, part_by_part]

ORDERS: dict[str, Callable[[int], list[tuple[bool, int]]]] = {
    "1F1B": lambda ahead: [(m.is_forward, m.microbatch) for m in schedule(NUM_MICROBATCHES, ahead)],
    "last first": lambda ahead: [
        move
        for first in range(0, NUM_MICROBATCHES, ahead)
        for numbers in [range(first, min(first + ahead, NUM_MICROBATCHES))]
        for move in [(True, m) for m in numbers] + [(False, m) for m in reversed(numbers)]
    ],
}


def step(
    model: Chain,
    inputs: Sequence[Tensor],
    order: Sequence[tuple[bool, int]],
    backward: Backward,
    context: Context,
) -> list[Tensor]:
    """One step; the losses, all that backward came to, and every gradient."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    losses: dict[int, Tensor] = {}
    found: dict[int, list[Tensor]] = {}
    for is_forward, number in order:
        leaf = leaves[number]
        if is_forward:
            with context:
                losses[number] = model(leaf).square().mean()
        else:
            loss = losses.pop(number)
            found[number] = [loss.detach(), *backward(loss, leaf)]
    results = [tensor for number in sorted(found) for tensor in found[number]]
    results += [t.grad for t in (*leaves, *model.weights) if t.grad is not None]
    model.zero_grad()
    return results


@pytest.mark.covering(2)
@pytest.mark.parametrize("backward", BACKWARDS, ids=lambda backward: backward.__name__)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("in_flight", [2, 3])
def test_microbatches_in_flight(
    activations: OffloadActivations,
    backend: Backend,
    in_flight: int,
    order: str,
    backward: Backward,
) -> None:
    on, off = (Chain(("a",), 3, is_on=False, device=backend.device) for _ in range(2))
    moves = ORDERS[order](in_flight)
    assert most_in_flight(moves) == in_flight
    for number in range(2):
        inputs = make_inputs(NUM_MICROBATCHES, step=number, device=backend.device)
        expected = step(off, inputs, moves, backward, nullcontext())
        assert same_bits(step(on, inputs, moves, backward, activations), expected), number
        assert_idle(activations)
    assert activations.statistics().bytes_offloaded > 0


def most_in_flight(moves: Sequence[tuple[bool, int]]) -> int:
    """How many forwards wait for their backward at most."""
    waiting = [
        sum(1 if is_forward else -1 for is_forward, _ in moves[:n]) for n in range(len(moves))
    ]
    return max(waiting)


@pytest.mark.parametrize("in_flight", [2, 3])
def test_each_in_flight_is_on_the_host(
    activations: OffloadActivations, backend: Backend, in_flight: int
) -> None:
    """But for what is kept of the last, whose backward comes next."""
    model = Chain(("a",), 3, is_on=False, device=backend.device)
    held, losses = [0], []
    for x in make_inputs(in_flight, device=backend.device):
        with activations:
            losses.append(model(x.requires_grad_()).square().mean())
        held.append(activations.statistics().host_bytes_in_use)
    grown = [after - before for before, after in zip(held, held[1:], strict=False)]
    assert grown[0] > 0
    assert all(more > grown[0] for more in grown[1:]), "and each sends what the one before it kept"
    losses.clear()
    assert_idle(activations)


def changed_in_flight(
    model: Chain, inputs: Sequence[Tensor], context: Context, change: float
) -> list[Tensor]:
    """What the last microbatch saved is changed in place before the first one's backward."""
    model.zero_grad()
    losses = []
    for x in inputs:
        with context:
            y = model(x.clone().requires_grad_()).exp()
            losses.append(y.square().mean())
    with torch.no_grad():
        y.add_(change)
    for loss in losses:
        loss.backward()
    return [weight.grad for weight in model.weights if weight.grad is not None]


def test_save_on_cpu_is_no_oracle(activations: OffloadActivations, backend: Backend) -> None:
    """What autograd refuses it trains with, on a CPU wrongly; plain training is the measure."""
    model = Chain(("a",), 1, is_on=False, device=backend.device)
    inputs = make_inputs(2, device=backend.device)
    refusal = "modified by an inplace operation"
    with pytest.raises(RuntimeError, match=refusal):
        changed_in_flight(model, inputs, nullcontext(), 1)
    changed = changed_in_flight(model, inputs, save_on_cpu(), 1)
    as_saved = changed_in_flight(model, inputs, save_on_cpu(), 0)
    assert same_bits(changed, as_saved) == (backend.device.type != "cpu")
    activations.stash.max_tensors = None
    with pytest.raises(SavedTensorModifiedError, match=refusal):
        changed_in_flight(model, inputs, activations, 1)
    assert_idle(activations)
