"""Promise 3: bytes live as long as autograd holds the saved tensor, in any kind of backward."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from helpers.saving import GivesSaved, ReadsTwice
from helpers.sessions import (
    assert_idle,
    assert_same,
    begin_microbatch,
    begin_step,
    check,
    drawn,
    gradients,
    group,
    in_use,
    session,
    settle,
)
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager

kinds = pytest.mark.parametrize("kind", ["late", "threads"])


def forward(is_on: bool, seed: int = 0, parts: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    """Input, weights, and what each part gave."""
    leaves = [drawn(4, 4, seed=10 * seed + n).requires_grad_() for n in range(parts + 1)]
    h, outputs = leaves[0] * 2, []
    for number, weight in enumerate(leaves[1:]):
        h = group(h, lambda h, w=weight: torch.tanh(h @ w).sin(), is_on, f"part {number % 2}")
        outputs.append(h)
    return leaves, outputs


# Ways to go backward


def by_parts(is_on: bool) -> list[Tensor]:
    """The gradient of one input after another."""
    leaves, outputs = forward(is_on)
    results = []
    for leaf in leaves:
        results += torch.autograd.grad(outputs[-1].sum(), leaf, retain_graph=True)
    return results


def double(is_on: bool) -> list[Tensor]:
    leaves, outputs = forward(is_on)
    (first,) = torch.autograd.grad(outputs[-1].sum(), leaves[0], create_graph=True)
    first.square().sum().backward()
    return [first.detach(), *gradients(*leaves)]


def reads_twice(is_on: bool) -> list[Tensor]:
    x = drawn(4, 4).requires_grad_()
    y = group(x * 2, ReadsTwice.apply, is_on)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    return gradients(x)


def gives_saved(is_on: bool) -> list[Tensor]:
    """A view of a saved tensor outlives its node."""
    x = drawn(4, 4).requires_grad_()
    h = x * 2
    y = group(h, GivesSaved.apply, is_on)
    (gradient,) = torch.autograd.grad(y.sum(), h, retain_graph=True)
    del y
    return [gradient, *torch.autograd.grad(h, x, gradient)]


def two_branches(is_on: bool) -> list[Tensor]:
    """Groups are met in another order than the reverse of their forward."""
    x = drawn(4, 4).requires_grad_()
    first = group(x * 2, lambda h: h.sin().exp(), is_on, "first")
    second = group(x * 3, lambda h: h.cos().exp(), is_on, "second")
    third = group(first, lambda h: h.tanh().sin(), is_on, "third")
    for y in (first * 1, second, third):
        y.sum().backward(retain_graph=True)
    (third * second).sum().backward()
    return gradients(x)


def unused_branch(is_on: bool) -> list[Tensor]:
    """A group whose output nothing needs, and one on a path that gets no gradient."""
    leaves, outputs = forward(is_on)
    group(outputs[0] * 2, torch.exp, is_on, "dropped")
    detached = group(outputs[1] * 2, torch.exp, is_on, "detached").detach()
    (outputs[-1] * detached).sum().backward()
    return gradients(*leaves)


def marker_output_changed(is_on: bool) -> list[Tensor]:
    """What start and commit give may be changed in place, also through a view."""
    x = drawn(4, 4).requires_grad_()
    h = x * 2
    for _ in range(2):
        with off_interface(is_on, h, "part") as h:
            y = h.add_(1).sin() * 2
        h = off_interface.group_commit(y, name="part") if is_on else y
        h.add_(h.sum())
        h[1:].add_(2)
    h.sum().backward()
    return gradients(x)


def weights_two_microbatches_late(is_on: bool) -> list[Tensor]:
    results: list[Tensor] = []
    waiting = []
    for number in range(6):
        if number < 4:
            begin_microbatch(is_on)
            leaves, outputs = forward(is_on, seed=number)
            y = outputs[-1].sum()
            _, parts = stage_backward_input([y], None, [leaves[0]], iter(leaves[1:]))
            waiting.append((leaves, parts))
        if number > 1:
            leaves, parts = waiting.pop(0)
            stage_backward_weight(iter(leaves[1:]), parts)
            results += gradients(*leaves)
    return results


def input_without_grad(is_on: bool) -> list[Tensor]:
    """The first group's input is a batch of tokens."""
    weight, table = drawn(4, 4).requires_grad_(), drawn(9, 4)
    tokens = torch.arange(6) % 9
    h = group(tokens, lambda t: (table[t] @ weight).sin(), is_on)
    group(h, lambda h: h.exp().tanh(), is_on, "next").sum().backward()
    return gradients(weight)


WAYS = [
    by_parts,
    double,
    reads_twice,
    gives_saved,
    two_branches,
    unused_branch,
    marker_output_changed,
    weights_two_microbatches_late,
    input_without_grad,
]


@pytest.mark.field("F06")
@pytest.mark.field("F16")
@pytest.mark.field("F17")
@pytest.mark.field("F20")
@pytest.mark.field("F25")
@pytest.mark.field("F43")
@pytest.mark.parametrize("program", WAYS)
def test_backward_in_any_way(program: Callable[[bool], list[Tensor]]) -> None:
    check(program, steps=3)


# Several microbatches


@pytest.mark.field("F49")
@kinds
@pytest.mark.parametrize("order", [[3, 2, 1, 0], [2, 0, 3, 1], [1, 2]], ids=str)
def test_microbatches_in_any_order(kind: str, order: list[int]) -> None:
    """A tag is bound to its microbatch, whichever chunk is the current one."""

    def program(is_on: bool) -> list[Tensor]:
        graphs = []
        for number in range(4):
            begin_microbatch(is_on and number > 0)
            graphs.append(forward(is_on, seed=number))
        for number in order:
            graphs[number][1][-1].square().sum().backward()
        return gradients(*(leaf for leaves, _ in graphs for leaf in leaves))

    check(program, kind, steps=3)


# Bytes come back


@kinds
@pytest.mark.parametrize("when", ["before", "between", "behind"])
def test_host_bytes_return_when_the_graph_dies(kind: str, when: str) -> None:
    """Before any backward, between two of a retained graph, and behind the last; no collector."""
    with session(kind) as manager:
        for _ in range(3):
            gc.disable()
            try:
                begin_step()
                leaves, outputs = forward(True)
                settle(manager)
                assert manager.statistics().host_bytes_in_use > 0
                if when != "before":
                    outputs[-1].sum().backward(retain_graph=when == "between")
                del outputs
                settle(manager)
                assert not any(in_use(manager).values())
            finally:
                gc.enable()


@kinds
def test_a_graph_outlives_its_manager(kind: str) -> None:
    leaves, outputs = forward(False)
    outputs[-1].sum().backward()
    expected = gradients(*leaves)
    with session(kind) as manager:
        begin_step()
        leaves, outputs = forward(True)
        PipelineOffloadManager.reset_instance()
        outputs[-1].sum().backward()
        assert_same(gradients(*leaves), expected)
        del outputs
        assert_idle(manager)
