"""Promise 6 where groups save one memory: it is copied once, and each gets back what it saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.saving import Keeps, Make, Saved, dtensor, one_rank
from helpers.sessions import (
    assert_idle,
    assert_same,
    begin_step,
    drawn,
    gradients,
    group,
    session,
    settle,
)
from torch import Tensor

from pp_offload import OffloadActivations

ROWS, COLUMNS = 6, 4
NBYTES = ROWS * COLUMNS * 4

kinds = pytest.mark.parametrize("kind", ["late", "cpu"])

WAYS: dict[str, Make] = {
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
@pytest.mark.parametrize("first", WAYS)
def test_each_group_gets_back_its_own_view_of_one_copy(kind: str, first: str, window: int) -> None:
    """In any order of them; for a backward within one window it comes back once."""

    def run(is_on: bool) -> tuple[list[Tensor], list[Saved]]:
        came_back: list[Saved] = []
        x = drawn(ROWS, COLUMNS).requires_grad_()
        h = x.detach() * 1.5
        y = x
        for way in sorted(WAYS, key=lambda way: way != first):
            keep = lambda x, way=way: Keeps.apply(x, lambda _: WAYS[way](h), came_back)  # noqa: E731
            y = group(y, keep, is_on, way)
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


@kinds
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


@kinds
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


@kinds
@pytest.mark.parametrize("is_context", [False, True], ids=["groups", "context"])
def test_no_copy_of_an_earlier_step_is_shared(kind: str, is_context: bool) -> None:
    """A fused optimizer changes tensors between two steps, and counts no change."""
    x, w = drawn(4, 4).requires_grad_(), drawn(4, 4, seed=1)

    def compute(x: Tensor) -> Tensor:
        return (x * w).sin().sum()

    with session(kind) as manager:
        context = OffloadActivations(
            min_offload_size=1, max_fwd_stash_size=1, backend=manager.backend
        )

        def forward() -> Tensor:
            if is_context:
                with context:
                    return compute(x)
            begin_step()
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
