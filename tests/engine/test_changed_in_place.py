"""A tensor that was changed in place is refused where autograd refuses it: when backward asks.

A group shares the copy that another has made, and never one of what has changed since. Tensors
with one memory may count changes apart, as the parts of ``unsafe_chunk``, or ``.data``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import permutations

import pytest
import torch
from conftest import on_two_backends
from helpers.scenarios import begin, check_steps, make_inputs
from helpers.sessions import (
    assert_idle,
    assert_same,
    begin_step,
    drawn,
    gradients,
    group,
    session,
    settle,
    side_stream,
    unseen,
)
from torch import Tensor, nn
from torch.nn import functional as F

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager, SavedTensorModifiedError

# Copies that groups share


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


# A change while the copy is queued, which the engine alone has to notice


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


# Changes that nothing counts, and that autograd allows


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


@on_two_backends
@pytest.mark.parametrize("is_module", [True, False], ids=["module", "rows"])
@pytest.mark.parametrize("trains", [(False, True, False), (True, False, True)])
def test_statistics_are_those_of_the_last_training(
    manager: PipelineOffloadManager, is_module: bool, trains: tuple[bool, ...]
) -> None:
    """Batch norm writes them and counts no change; autograd reads what is there at the backward.

    They are buffers of a module, or rows of one tensor.
    """
    device = manager.backend.device

    def step(is_on: bool, number: int, order: tuple[int, ...]) -> list[Tensor]:
        norm = nn.BatchNorm1d(8).to(device)
        rows = torch.tensor([[0.0], [1.0]], device=device).expand(2, 8).clone()

        def compute(x: Tensor, is_training: bool) -> Tensor:
            if is_module:
                return norm.train(is_training)(x).sin()  # type: ignore[no-any-return]
            return F.batch_norm(x, *rows, None, None, is_training).sin()

        inputs = make_inputs(3, length=6, width=8, device=device)
        losses = []
        for x, is_training in zip(inputs, trains, strict=True):
            begin(is_on)
            y = group(2 * x.requires_grad_(), partial(compute, is_training=is_training), is_on)
            losses.append(y.square().mean())
        for index in order:
            losses[index].backward()
        return [*(loss.detach() for loss in losses), *gradients(*inputs)]

    for order in permutations(range(3)):
        check_steps(manager, partial(step, order=order), steps=1)
