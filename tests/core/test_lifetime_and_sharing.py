"""Promises 3 and 6: bytes live as long as autograd holds saved tensors, and are copied once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.saving import GivesSaved, Keeps, Make, ReadsTwice, Saved, dtensor, one_rank
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
from pp_offload import OffloadActivations, PipelineOffloadManager

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


# Where groups save one memory: it is copied once, and each gets back what it saved


ROWS, COLUMNS = 6, 4
NBYTES = ROWS * COLUMNS * 4

inline_or_late = pytest.mark.parametrize("kind", ["late", "cpu"])

VIEWS: dict[str, Make] = {
    "whole": lambda h: [h],
    "flat": lambda h: [h.view(-1)],
    "transposed": lambda h: [h.t()],
    "integers of its bytes": lambda h: [h.view(torch.int32), h.view(torch.int16)],
    "stride of a single row": lambda h: [h.as_strided((1, ROWS, COLUMNS), (1, COLUMNS, 1))],
    "siblings": lambda h: [h, h.t()],
}


@pytest.mark.field("F04")
@pytest.mark.field("F60")
@pytest.mark.parametrize(
    ("kind", "window"), [("late", 0), ("late", 10**6), ("random:1", 0), ("cpu", 10**6)]
)
@pytest.mark.parametrize("first", VIEWS)
def test_each_group_gets_back_its_own_view_of_one_copy(kind: str, first: str, window: int) -> None:
    """In any order of them; for a backward within one window it comes back once."""

    def run(is_on: bool) -> tuple[list[Tensor], list[Saved]]:
        came_back: list[Saved] = []
        x = drawn(ROWS, COLUMNS).requires_grad_()
        h = x.detach() * 1.5
        y = x
        for view in sorted(VIEWS, key=lambda view: view != first):
            keep = lambda x, view=view: Keeps.apply(x, lambda _: VIEWS[view](h), came_back)  # noqa: E731
            y = group(y, keep, is_on, view)
        return [h, y, x], came_back

    (_, y, x), right = run(False)
    expected = torch.autograd.grad(y.sum(), x)
    with session(kind, prefetch_bytes=window) as manager:
        begin_step()
        before = manager.statistics()
        (h, y, x), came_back = run(True)
        settle(manager)
        assert_same(torch.autograd.grad(y.sum(), x), expected)
        assert came_back == right
        moved = manager.statistics().since(before)
        assert moved.bytes_offloaded == NBYTES
        assert window == 0 or moved.bytes_reloaded == NBYTES
        del y, h
        assert_idle(manager)


# A copy that is not what a later group saves


CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "by the alias": lambda h, alias: alias.add_(1),
    "below the alias": lambda h, alias: (h.add_(1), alias)[1],
    "by itself": lambda h, alias: h.add_(1),
}


@inline_or_late
@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_copy_of_an_older_version_is_not_shared(
    kind: str, num_before: int, change: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Whichever alias counts the change, and if as many were counted before the first copy."""
    with session(kind) as manager:
        begin_step()
        x, w = (drawn(ROWS, COLUMNS, seed=seed).requires_grad_() for seed in range(2))
        h = drawn(ROWS, COLUMNS, seed=2)
        for _ in range(num_before):
            h.mul_(2)
        first, right, alias = h.clone(), h + 1, h.data
        y = group(x, lambda x: x * h, name="first")
        settle(manager)
        changed = change(h, alias)
        z = group(w, lambda w: w * changed, name="second")
        assert_same(torch.autograd.grad(z.sum(), w), [right])
        assert_same(torch.autograd.grad(y.sum(), x), [first])
        del y, z
        assert_idle(manager)


@inline_or_late
@pytest.mark.parametrize("is_plain_first", [False, True])
def test_a_copy_of_what_a_wrapper_changed_is_not_shared(kind: str, is_plain_first: bool) -> None:
    """The wrapper counts the change, and the tensor inside it does not."""
    with one_rank(), session(kind) as manager:
        begin_step()
        wrapped, leaf = (dtensor(ROWS, COLUMNS, seed=n) for n in (1, 2))
        leaf.requires_grad_()
        x = drawn(ROWS, COLUMNS).requires_grad_()
        inside = wrapped.detach()._local_tensor
        before = inside.clone()
        saves: list[Any] = [
            lambda: group(x, lambda x: x * inside),
            lambda: group(leaf, lambda leaf: leaf * wrapped),
        ]
        first, second = saves if is_plain_first else reversed(saves)
        living = first()
        settle(manager)
        wrapped.add_(1)
        y = second()
        y.sum().backward()
        (got,) = gradients(leaf if is_plain_first else x)
        assert_same([got.to_local() if is_plain_first else got], [before + 1])
        del living, y
        assert_idle(manager)


@inline_or_late
@pytest.mark.parametrize("between", ["steps", "microbatches", "forwards of a context"])
def test_no_copy_of_an_earlier_forward_is_shared(kind: str, between: str) -> None:
    """A fused optimizer or a collective changes tensors in between, and counts no change."""
    x, w = drawn(4, 4).requires_grad_(), drawn(4, 4, seed=1)

    def compute(x: Tensor) -> Tensor:
        return (x * w).sin().sum()

    with session(kind) as manager:
        context = OffloadActivations(
            min_offload_size=1, max_fwd_stash_size=1, backend=manager.backend
        )

        def forward() -> Tensor:
            if between == "forwards of a context":
                with context:
                    return compute(x)
            begin_step() if between == "steps" else begin_microbatch()
            return group(x, compute)  # type: ignore[no-any-return]

        alive = forward()
        settle(manager)
        with torch.autograd._unsafe_preserve_version_counter(w):
            w.mul_(2)
        forward().backward()
        assert_same(gradients(x), torch.autograd.grad(compute(x), x))
        del alive


def gap_is_written(x: Tensor, is_on: bool, settle: Callable[[], None]) -> Tensor:
    """The first group saves two parts of three; its copy, which is queued, reads no third."""
    a, b, c = (x * 2).unsafe_chunk(3)
    u = group(a, lambda a: a * c, is_on, "one")
    b.sigmoid_()
    return u + group(a, lambda a: a.sin() * b.cos() + c.sin(), is_on, "two")


def unsaved_is_received(x: Tensor, is_on: bool, settle: Callable[[], None]) -> Tensor:
    """Between what the first group saves, a write that counts no change, as collectives do.

    As many bytes as the storage has were saved, some of them twice. The second group saves all.
    """
    h = x * 2
    a, b, c = h[:2], h[2:4], h[4:]
    u = group(a, lambda a: a.sin() * c.cos() * a.view(-1).cos().view(2, 4), is_on, "one")
    settle()
    b.data.fill_(3.0)
    return torch.cat([u, u, u]) + group(h, lambda h: h * h.exp(), is_on, "two")


def filled_anew(x: Tensor, is_on: bool, settle: Callable[[], None]) -> Tensor:
    """Who saved it first has no use for it any more; another tensor of its group is alive."""
    buffer, total, alive = torch.empty_like(x), torch.zeros_like(x), []
    for number in (1.0, 2.0):
        buffer.data.fill_(number)
        h = x.detach().requires_grad_()

        def both(h: Tensor) -> Tensor:
            alive.append((h * 2).sin())
            return h * buffer

        y = group(h, both, is_on, f"microbatch {number}")
        settle()
        total += torch.autograd.grad(y.sum(), h)[0]
    return (x * total).sin()


@pytest.mark.parametrize("kind", ["cpu", "late"])
@pytest.mark.parametrize("program", [gap_is_written, unsaved_is_received, filled_anew])
def test_no_copy_of_what_has_changed_is_shared(kind: str, program: Callable[..., Tensor]) -> None:
    def run(is_on: bool, settle: Callable[[], None]) -> list[Tensor]:
        x = torch.linspace(-1, 1, 24).view(6, 4).requires_grad_()
        program(x, is_on, settle).sum().backward()
        return gradients(x)

    with session(kind) as manager:
        begin_step()
        assert_same(run(True, lambda: settle(manager)), run(False, lambda: None))
        settle(manager)
        assert_idle(manager)
