"""Promise 6: what comes back is what was saved, whatever kind of tensor it was."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from helpers.saving import Keeps, Make, Saved, dtensor, one_rank
from helpers.sessions import (
    KINDS,
    assert_idle,
    assert_no_hooks,
    assert_same,
    begin_step,
    check,
    drawn,
    gradients,
    group,
    session,
    settle,
    side_stream,
    unseen,
)
from torch import Tensor, nn

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager, RaceError, SavedTensorModifiedError, offload_modules

ROWS, COLUMNS = 6, 4
NBYTES = ROWS * COLUMNS * 4

on_two = pytest.mark.parametrize("kind", ["late", "cpu"])

PAYLOADS: dict[str, Make] = {
    "whole": lambda h: [h],
    "transposed": lambda h: [h.t()],
    "rest": lambda h: [h[1:]],
    "every second column": lambda h: [h[:, ::2]],
    "columns": lambda h: [h[:, 1:3]],
    "offset of one": lambda h: [h.view(-1)[1:13].view(3, 4)],
    "overlapping": lambda h: [h.as_strided((3, 4), (2, 1), 1)],
    "diagonal": lambda h: [h.diagonal()],
    "expanded": lambda h: [h[:1].expand(ROWS, COLUMNS), h.unsqueeze(1).expand(-1, 3, -1)],
    "no dimension": lambda h: [h[0, 0], h.sum()],
    "empty": lambda h: [h[:0], h.new_empty(0, 5), h],
    "channels last": lambda h: [h.view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)],
    "integers of its bytes": lambda h: [h.view(torch.int16), h.view(torch.uint8)],
    "complex": lambda h: [torch.view_as_complex(h.view(ROWS, 2, 2)) * 1j],
    "conjugate": lambda h: [(torch.view_as_complex(h.view(ROWS, 2, 2)) * 1j).conj()],
    "negated": lambda h: [(torch.view_as_complex(h.view(ROWS, 2, 2)) * 1j).conj().imag],
    "bool": lambda h: [h > 0],
    "half and double": lambda h: [h.half(), h.bfloat16(), h.double()],
    "integers": lambda h: [h.argsort(0), h.to(torch.int8)],
    "eight bits": lambda h: [h.to(torch.float8_e4m3fn)],
    "any bits": lambda h: [(h.view(torch.int32) | 0x7F800001).view(torch.float32), -(h * 0)],
    "siblings": lambda h: [h, h.t(), h[1:], h.view(torch.int16), h[:1].expand(3, COLUMNS)],
    "the same twice": lambda h: [h, h, h.detach()],
    "equal, not the same": lambda h: [h.clone(), h.clone()],
}


@pytest.mark.field("F40")
@pytest.mark.parametrize("make", PAYLOADS.values(), ids=PAYLOADS)
def test_bytes_and_geometry_come_back(make: Make) -> None:
    """Size, stride, offset and dtype; no storage is copied twice."""
    x = drawn(ROWS, COLUMNS)

    def run(is_on: bool) -> tuple[list[Tensor], list[Saved]]:
        leaf, came_back = x.clone().requires_grad_(), []
        y = group(leaf * 1.5, lambda h: Keeps.apply(h, make, came_back), is_on)
        if is_on:
            settle(PipelineOffloadManager.get_instance())
        y.sum().backward()
        return gradients(leaf), came_back

    expected, right = run(False)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in make(x)}
    with session("late") as manager:
        for _ in range(2):
            before = manager.statistics().bytes_offloaded
            begin_step()
            got, came_back = run(True)
            assert_same(got, expected)
            assert came_back == right
            assert_idle(manager)
            assert manager.statistics().bytes_offloaded - before <= sum(storages.values())


@pytest.mark.field("F34")
@on_two
def test_a_storage_is_copied_once(kind: str) -> None:
    """Several operators save it, whole and in part; two groups do."""

    with session(kind) as manager:
        begin_step()
        x = drawn(ROWS, COLUMNS).requires_grad_()
        h = x * 2
        y = group(h, lambda h: h.sin() + h.cos() + h.t().square().t() + h[1:].square().sum())
        moved = manager.statistics().bytes_offloaded
        assert moved == NBYTES
        y = y + group(h, torch.exp, name="other").sum()
        assert manager.statistics().bytes_offloaded == moved + NBYTES, "h twice, or not exp(h)"
        y.sum().backward()
        del y, h
        assert_idle(manager)


# Changed in place


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "add": lambda t: t.add_(1),
    "through a view": lambda t: t.t()[1:].mul_(3),
}
changes = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


LATE = ("queued", "let go")
"""Once the copy is queued, which perhaps has ended before backward asks."""


def sine(is_on: bool, change: Callable[[Tensor], object], when: str) -> list[Tensor]:
    """The gradient of sin(2 x), whose input is changed at some time, or never."""
    x = drawn(ROWS, COLUMNS, seed=3).requires_grad_()
    h = x * 2
    if when == "before":
        change(h)
    with off_interface(is_on, h, "core"):
        y = h.sin()
        if when == "inside":
            change(h)
    if when == "between":
        change(h)
    if is_on:
        off_interface.group_commit(y, name="core")
    if when in LATE:
        change(h)
    if is_on and when in ("let go", "copied"):
        settle(PipelineOffloadManager.get_instance())
    if when == "copied":
        change(h)
    z = y * 3
    if when == "other":
        change(z)
    z.sum().backward()
    return [z.detach(), *gradients(x)]


@pytest.mark.field("F03")
@pytest.mark.parametrize("kind", KINDS)
@changes
@pytest.mark.parametrize("when", ["inside", "between", *LATE])
def test_changed_before_its_copy_has_run(
    kind: str, change: Callable[[Tensor], object], when: str
) -> None:
    """It raises; or, once the copy is queued, the value at save is used: never the changed one."""
    with pytest.raises(RuntimeError, match="inplace"):
        sine(False, change, when)
    with session(kind) as manager:

        def change_it(tensor: Tensor) -> None:
            with unseen(manager.backend) if when in LATE else nullcontext():
                change(tensor)

        for _ in range(2):
            begin_step()
            try:
                got = sine(True, change_it, when)
            except SavedTensorModifiedError as refusal:
                assert "core" in str(refusal) and f"({ROWS}, {COLUMNS})" in str(refusal)
            else:
                assert when in LATE and kind != "late", "the copy has run behind the change"
                assert_same(got, sine(False, change, "never"))
            assert_no_hooks()
        begin_step()
        assert_same(sine(True, change, "never"), sine(False, change, "never"))
        assert_idle(manager)


@on_two
@pytest.mark.parametrize("what", ["marked", "without room", "wrapper"])
def test_a_change_of_what_stays_raises(kind: str, what: str) -> None:
    """Or of a wrapper, which counts the changes of what is inside."""
    make = dtensor if what == "wrapper" else drawn
    options = {"host_budget_bytes": 0} if what == "without room" else {}
    with one_rank(), session(kind, **options):
        begin_step()
        x, factor = make(ROWS, COLUMNS).requires_grad_(), make(ROWS, COLUMNS)
        if what == "marked":
            off_interface.mark_not_offloadable(factor)
        y = group(x, lambda x: x * factor)
        factor.add_(1)
        with pytest.raises(SavedTensorModifiedError):
            y.sum().backward()


@on_two
@changes
@pytest.mark.parametrize("when", ["before", "copied", "other"])
def test_changed_when_it_harms_nobody(
    kind: str, change: Callable[[Tensor], object], when: str
) -> None:
    alone = "never" if when == "copied" else when  # without a copy the change does harm
    check(lambda on: sine(on, change, when if on else alone), kind, steps=1)


class UsesSavedAsScratch(torch.autograd.Function):
    """The square; its backward changes what was saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.mul_(2).mul_(gradient)


@on_two
@pytest.mark.parametrize("rematerialize", ["none", "cheap"])
def test_changed_by_the_backward_of_another(kind: str, rematerialize: str) -> None:
    """It raises, or the second reader gets the value at save, which may be computed again."""

    def program(is_on: bool, is_apart: bool = False) -> list[Tensor]:
        x, w = (drawn(ROWS, COLUMNS, seed=n).requires_grad_() for n in range(2))

        def compute(x: Tensor) -> Tensor:
            h = x.exp() * 1.5
            return h * w + UsesSavedAsScratch.apply(h.clone() if is_apart else h)

        y = group(x * 2, compute, is_on)
        if is_on:
            settle(PipelineOffloadManager.get_instance())
        y.sum().backward()
        return gradients(x, w)

    expected = program(False, True)
    with session(kind, rematerialize=rematerialize) as manager:
        begin_step()
        try:
            assert_same(program(True), expected)
            assert (manager.statistics().bytes_computed_again > 0) is (rematerialize == "cheap")
        except (SavedTensorModifiedError, RaceError) as refusal:
            assert "part" in str(refusal)
        begin_step()
        assert_same(program(True, True), expected)
        assert_idle(manager)


@on_two
def test_what_was_looked_at_and_changed_is_not_given_to_backward(kind: str) -> None:
    """The only use is counted, and the caller holds the tensor."""
    x, other, nodes = drawn(ROWS, COLUMNS).requires_grad_(), drawn(ROWS, COLUMNS, seed=1) * 2, []

    def compute(x: Tensor) -> Tensor:
        y = x * other.clone()
        nodes.append(y.grad_fn)
        return y

    with session(kind) as manager:
        begin_step()
        y = group(x, compute)
        settle(manager)
        seen = nodes.pop()._saved_other
        seen.mul_(3)
        y.sum().backward()
        assert_same(gradients(x), [other])


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("kind", ["late", "threads"])
def test_an_alias_that_counts_its_changes_apart_is_watched(kind: str, is_shared: bool) -> None:
    """Also where its bytes left with the copy of another group.

    The value at save is used, or an error names a group: never the changed value.
    """
    with session(kind) as manager:
        begin_step()
        x, w = drawn(2**16).requires_grad_(), drawn(2**16, seed=1).requires_grad_()
        y = x * 2
        apart = y.data
        first = group(y, torch.sin, name="first") if is_shared else y
        loss = group(y, lambda y: y.sin().detach() + apart * w, name="core") + first.detach()
        with unseen(manager.backend), torch.no_grad():
            apart.add_(1)
        try:
            got = torch.autograd.grad(loss.sum(), w)
        except SavedTensorModifiedError as error:
            assert "'core'" in str(error) or "'first'" in str(error)
        else:
            assert_same(got, [x.detach() * 2])


def test_a_change_is_seen_on_another_stream_than_that_of_the_commit() -> None:
    """Which cannot take the source back, and would get what the copy has made of it."""
    with session("late") as manager:
        begin_step()
        backend = manager.backend
        x = drawn(3, 4).requires_grad_()
        main, side = backend.current_stream(), side_stream(backend)
        with off_interface(True, x, "core"):
            y = x * 2
            side.wait_stream(main)
            with backend.stream(side):
                z = y.sin()
            main.wait_stream(side)
        loss = off_interface.group_commit(z, name="core").sum()
        with unseen(backend), torch.no_grad():
            y.add_(1)
        side.wait_stream(main)
        with backend.stream(side), pytest.raises(SavedTensorModifiedError, match="group 'core'"):
            torch.autograd.grad(loss, x)


@pytest.mark.parametrize("is_verified", [False, True])
@pytest.mark.parametrize("kind", ["cpu", "eager"])
def test_a_buffer_is_resized_for_batches_of_any_length(kind: str, is_verified: bool) -> None:
    """Memory that was copied from may be given another size afterwards."""
    weight, batch = drawn(8, 8).requires_grad_(), torch.empty(0)
    with session(kind, verify=is_verified) as manager:
        for length in (4, 6, 2, 9):
            values = drawn(length, 8, seed=length)
            batch.resize_(length, 8).copy_(values)
            begin_step()
            y = group(batch, lambda batch: (batch @ weight).tanh())
            got = torch.autograd.grad(y.sum(), weight)
            manager.backend.synchronize()
            assert_same(got, torch.autograd.grad((values @ weight).tanh().sum(), weight))


# What never moves


TOKENS = torch.arange(ROWS).view(2, 3) % COLUMNS


class Layer(nn.Module):
    """Uses parameters and a buffer of its own, and views of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(COLUMNS, COLUMNS)
        self.scale = nn.Parameter(torch.rand(COLUMNS, COLUMNS))
        self.register_buffer("table", torch.rand(COLUMNS, COLUMNS))

    def forward(self, h: Tensor) -> Tensor:
        y = self.linear(h) + h @ self.scale.detach().t() * self.linear.weight.data[0]
        y = y + F.embedding(TOKENS, self.scale).sum() * 2
        return y + (h @ self.table) * self.table[0] + h @ self.table.t()


@pytest.mark.field("F47")
@on_two
def test_no_byte_of_a_parameter_or_buffer_moves(kind: str) -> None:
    """Nor of their views."""
    model = nn.Sequential(Layer())

    def program() -> list[Tensor]:
        x = drawn(ROWS, COLUMNS).requires_grad_()
        model(x * 2).sum().backward()
        return gradients(x, *model.parameters())

    expected = program()
    with session(kind) as manager, offload_modules(model, {"part": "0"}):
        begin_step()
        assert_same(program(), expected)
        assert manager.statistics().bytes_offloaded == NBYTES + TOKENS.nbytes
        assert_idle(manager)


@pytest.mark.field("F42")
@on_two
def test_small_and_foreign_tensors_stay(kind: str) -> None:
    """Below the threshold in elements; on another device."""
    with session(kind, min_offloaded_tensor_size=10) as manager:
        off_interface.reset()
        off_interface.init_chunk_handler(None, None, ROWS * COLUMNS)
        came_back: list[Saved] = []
        x = drawn(ROWS, COLUMNS).requires_grad_()
        y = group(x * 2, lambda h: Keeps.apply(h, lambda h: [h[:, :3].clone(), h], came_back))
        assert manager.statistics().bytes_offloaded == NBYTES
        meta = torch.empty(2, 3, device="meta", requires_grad=True)
        group(meta * 2, torch.sin)
        assert manager.statistics().bytes_offloaded == NBYTES
        y.sum().backward()
        assert [saved[0] for saved in came_back] == [(ROWS, 3), (ROWS, COLUMNS)]


# Forced release


@pytest.mark.parametrize("kind", KINDS)
def test_a_forced_tensor_is_emptied_behind_its_copy(kind: str) -> None:
    """And not behind the copy of the group before, which has to go first."""
    with session(kind, max_in_flight_bytes=2 * NBYTES) as manager:
        for step in range(2):
            begin_step()
            x = drawn(ROWS, COLUMNS).requires_grad_()
            before = group(x * 3, torch.sin, name="before")
            held = x * 2
            y = group(held, torch.sin, forced_released_tensors=[held])
            y = group(y, torch.cos, name="behind")
            settle(manager)
            assert (held.untyped_storage().nbytes() == 0) is (step == 0), "later it stays"
            (y + before).sum().backward()
            got = gradients(x)
            del y, held
            ((x * 2).sin().cos() + (x * 3).sin()).sum().backward()
            assert_same(got, gradients(x))
            assert_idle(manager)


@pytest.mark.field("F23")
@on_two
def test_a_forced_tensor_whose_memory_is_not_torchs_stays(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    array = numpy.ones((ROWS, COLUMNS), dtype=numpy.float32)
    with session(kind) as manager, caplog.at_level(logging.WARNING, "pp_offload"):
        begin_step()
        held, w = torch.from_numpy(array), drawn(ROWS, COLUMNS).requires_grad_()
        y = group(held, lambda h: h * w, forced_released_tensors=[held])
        settle(manager)
        assert held.eq(1).all()
        y.sum().backward()
        assert_same(gradients(w), [held])
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
