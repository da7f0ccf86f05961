"""Promises 5, 7, 8 and 10: bounds in bytes, exact accounts, changing steps, and running out."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.nets import ROWS, WIDTH, Net, inputs, train
from helpers.sessions import (
    assert_idle,
    assert_same,
    begin_microbatch,
    begin_step,
    check,
    drawn,
    gradients,
    group,
    session,
    settle,
)
from helpers.toy import batches, make_model, run_step
from torch import Tensor, nn

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager
from pp_offload.testing import SimulatedBackend
from pp_offload.testing.streams import SimulatedEvent

PART = ROWS * WIDTH * 4
"""Bytes of one activation."""

kinds = pytest.mark.parametrize("kind", ["late", "threads"])


def saves_one(h: Tensor) -> Tensor:
    """A part that saves exactly one tensor, which nobody else has."""
    return h.mul(2).sin()


def chain(
    num: int, is_on: bool = True, each: Callable[[Tensor], object] = id, rows: int = ROWS
) -> tuple[Tensor, Tensor]:
    """Parts one behind another, each of which saves one tensor; input and output."""
    x = h = drawn(rows, WIDTH).requires_grad_()
    for number in range(num):
        h = group(h, saves_one, is_on, f"part {number % 2}")
        each(h)
    return x, h


# In flight


@pytest.mark.parametrize("kind", ["late", "random:1"])
@pytest.mark.parametrize("cap", [0, PART, 3 * PART])
def test_bytes_in_flight_are_capped_from_the_first_step_on(kind: str, cap: int) -> None:
    """The group that was offloaded last may be above the cap, unless that is 0."""
    with session(kind, max_in_flight_bytes=cap) as manager:

        def is_capped(h: Tensor) -> None:
            assert manager.statistics().bytes_in_flight <= (cap and cap + PART)

        for _ in range(3):
            begin_step()
            chain(6, each=is_capped)[1].sum().backward()
            assert_idle(manager)


# Prefetch


@pytest.mark.field("F37")
@kinds
@pytest.mark.parametrize("window", [0, PART, 3 * PART])
def test_no_more_than_the_window_is_reloaded_ahead(kind: str, window: int) -> None:
    """One tensor may always be."""
    with session(kind, prefetch_bytes=window) as manager:
        unused: list[int] = []

        def note(_: Tensor) -> None:
            unused.append(manager.statistics().bytes_reloaded_unused)

        for _ in range(3):
            begin_step()
            x, h = chain(6, each=lambda h: h.register_hook(note))
            settle(manager)
            h.sum().backward()
            del h
            assert_idle(manager)
        assert max(unused) <= max(window, PART)
        assert window < 2 * PART or max(unused) > 0, "nothing is prefetched"


@pytest.mark.field("F48")
@kinds
def test_reloads_are_ahead_of_their_use(kind: str) -> None:
    """In the first step most, then all; also where the first group's input needs no gradient."""
    with session(kind) as manager:
        weight = nn.Parameter(drawn(WIDTH, WIDTH))
        for step in range(4):
            before = manager.statistics()
            begin_step()
            h = drawn(ROWS, WIDTH)
            for number in range(6):
                h = group(h, lambda h: saves_one(h @ weight), name=f"part {number % 2}")
            settle(manager)
            h.sum().backward()
            done = manager.statistics().since(before)
            assert done.prefetched_reloads > done.on_demand_reloads
            assert step == 0 or done.on_demand_reloads == 0
            del h
            assert_idle(manager)


# The steady state


@pytest.mark.field("F33")
@pytest.mark.parametrize("order", ["late", "eager"])
@pytest.mark.parametrize("cap", [0, 4 * PART])
def test_the_steady_state_neither_waits_nor_allocates(order: str, cap: int) -> None:
    refusal = AssertionError("the host waits, or host memory is allocated")
    net = Net()
    expected = train(net, inputs(4), False, ahead=2)
    with session(order, max_in_flight_bytes=cap) as manager:
        assert_same(train(net, inputs(4), True, ahead=2), expected)
        with (
            patch.object(SimulatedEvent, "synchronize", side_effect=refusal),
            patch.object(SimulatedBackend, "synchronize", side_effect=refusal),
            patch.object(SimulatedBackend, "allocate_host", side_effect=refusal),
        ):
            for step in range(1, 4):
                assert_same(train(net, inputs(4), True, ahead=2), expected, f"step {step}")
        off_interface.reset()
        assert_idle(manager)


# Below a limit of the device


@pytest.mark.parametrize("kind", ["late", "random"])
@pytest.mark.parametrize("limit_bytes", [0, 27000, 2**30])
def test_below_any_limit_bits_are_those_without(kind: str, limit_bytes: int) -> None:
    """In steps that differ in how many microbatches there are, and how long these are."""
    bounds = {"max_in_flight_bytes": 200, "prefetch_bytes": 200}
    steps = [(2, 2, 5)] * 4 + [(3, 3, 5), (2, 2, 9), (2, 1, 3)] + [(3, 3, 9)] * 3
    sent = []
    with session(kind, device_limit_bytes=limit_bytes, **bounds) as manager:
        for number, (num, in_flight, length) in enumerate(steps):
            xs = batches(num, step=number, length=length)
            expected = run_step(make_model(groups=()), xs, in_flight=in_flight, offload=False)
            before = manager.statistics().bytes_offloaded
            assert_same(run_step(make_model(), xs, in_flight=in_flight), expected)
            sent.append(manager.statistics().bytes_offloaded - before)
        manager.backend.check()
    if limit_bytes == 0:
        assert all(sent)
    elif limit_bytes == 2**30:
        assert sent[0] > 0 and sent[3] == 0 and sent[4] > 0 and sent[-1] == 0
    else:
        assert 0 < sent[-1] < sent[-2], "some stay, and some leave"


# Exact accounts


@kinds
def test_statistics_are_exact(kind: str) -> None:
    with session(kind) as manager:
        before = manager.statistics()
        begin_step()
        x, h = chain(4)
        assert manager.statistics().since(before).bytes_offloaded == 4 * PART
        assert manager.statistics().live_tensors > 0
        settle(manager)
        assert manager.statistics().bytes_in_flight == 0
        assert manager.statistics().host_bytes_in_use >= 4 * PART
        h.sum().backward()
        del h
        done = manager.statistics().since(before)
        assert done.bytes_reloaded == done.bytes_offloaded == 4 * PART
        assert done.prefetched_reloads + done.on_demand_reloads > 0
        assert done.host_bytes_peak >= 4 * PART
        assert_idle(manager)


# Steps that differ


@pytest.mark.field("F21")
@kinds
def test_every_microbatch_offloads_however_many_there_are(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes scale with microbatches: nothing is silently left on the device."""
    caplog.set_level("INFO")
    net, counts = Net(("part",), layers=3), (2, 6, 3, 8, 1)
    with session(kind) as manager:
        for step, num in enumerate(counts):
            before = manager.statistics().bytes_offloaded
            got = train(net, inputs(num, step=step), True, ahead=2)
            moved = manager.statistics().bytes_offloaded - before
            assert_same(got, train(net, inputs(num, step=step), False, ahead=2), f"step {step}")
            # A group saves two tensors or three; one group of each name may stay.
            assert moved >= num * 2 * 2 * PART
            assert_idle(manager)
    changes = [line for line in caplog.messages if "the step changed from" in line]
    assert len(changes) == len(counts) - 2, "a plan is made of the steps before the last"


@pytest.mark.field("F14")
@pytest.mark.field("F15")
@kinds
def test_a_pass_without_grad_changes_nothing(kind: str) -> None:
    """First, between a forward and its backward, and between steps; bytes are those without it."""
    net, moved = Net(), []
    expected = train(net, [drawn(ROWS, WIDTH)], False)
    net.is_on = True
    for modes in ((), (torch.no_grad, torch.inference_mode)):
        with session(kind) as manager:

            def evaluate(modes: tuple[Any, ...] = modes) -> None:
                for mode in modes:
                    with mode():
                        begin_microbatch()
                        net(drawn(3, WIDTH))

            evaluate()
            for _ in range(3):
                off_interface.reset()
                evaluate()
                begin_microbatch()
                x = drawn(ROWS, WIDTH).requires_grad_()
                loss = net(x).square().mean()
                evaluate()
                loss.backward()
                got = [loss.detach(), *gradients(x, *net.parameters())]
                del loss
                evaluate()
                assert_same(got, expected)
                assert_idle(manager)
            moved.append(manager.statistics().bytes_offloaded)
    assert moved[0] == moved[1] > 0


# Running out


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.field("F32")
@kinds
def test_over_the_host_budget_a_group_stays_with_one_warning(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = chain(6, False, rows=256)
    y.sum().backward()
    expected = gradients(x)
    with session(kind, host_budget_bytes=2**14) as manager:
        for _ in range(3):
            begin_step()
            x, y = chain(6, rows=256)
            assert manager.statistics().host_bytes_reserved <= 2**14
            y.sum().backward()
            assert_same(gradients(x), expected)
            del y
            assert_idle(manager)
    (about,) = [text for text in warnings(caplog) if "budget" in text]
    assert "host_budget_bytes" in about


@pytest.mark.field("F32")
@pytest.mark.parametrize("available", [0, 2**17])
def test_a_host_that_gives_no_memory_loses_nothing(
    available: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_given = 0
    allocate = SimulatedBackend.allocate_host

    def allocate_host(backend: SimulatedBackend, nbytes: int) -> Tensor:
        nonlocal num_given
        if num_given + nbytes > available:
            raise MemoryError(f"no {nbytes} more bytes")
        num_given += nbytes
        return allocate(backend, nbytes)

    monkeypatch.setattr(SimulatedBackend, "allocate_host", allocate_host)
    net, xs = Net(), inputs(2, rows=512)
    with session("late") as manager:
        for _ in range(2):
            assert_same(train(net, xs, True, ahead=2), train(net, xs, False, ahead=2))
            assert_idle(manager)
    assert len(warnings(caplog)) == 1, warnings(caplog)


def room_for(num: int) -> Any:
    """So many tensors more fit on the device, until others go: reloads are made by empty_like."""
    allocate, made = torch.empty_like, list[weakref.ref[Tensor]]()

    def empty_like(*args: Any, **kwargs: Any) -> Tensor:
        if sum(ref() is not None for ref in made) >= num:
            raise torch.OutOfMemoryError("the device is full")
        tensor = allocate(*args, **kwargs)
        made.append(weakref.ref(tensor))
        return tensor

    return patch.object(torch, "empty_like", empty_like)


@kinds
@pytest.mark.parametrize("tiers", [("host",), ("disk",)], ids=str)
@pytest.mark.parametrize("num", [0, 1, 4])
def test_what_does_not_fit_ahead_comes_on_demand(
    kind: str, num: int, tiers: tuple[str, ...], tmp_path: Path
) -> None:
    """Without room for any, the error of torch comes, and backward can go on."""

    def program(is_on: bool) -> list[Tensor]:
        x = h = drawn(8, 8).requires_grad_()
        for _ in range(4):
            h = group(h, lambda h: torch.tanh(h.sin()).cos(), is_on)
        y = h.sum()
        if is_on:
            manager = PipelineOffloadManager.get_instance()
            settle(manager)
            is_full = pytest.raises(torch.OutOfMemoryError, match="the device is full")
            with room_for(num), nullcontext() if num else is_full:
                y.backward(retain_graph=num == 0)
        if not is_on or num == 0:
            y.backward()
        else:
            statistics = manager.statistics()
            assert statistics.bytes_reloaded == statistics.bytes_offloaded
        return gradients(x)

    options: dict[str, Any] = {"disk_dir": tmp_path} if "disk" in tiers else {}
    check(program, kind, max_in_flight_bytes=0, tiers=tiers, **options)
