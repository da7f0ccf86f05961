"""Promises 5, 7, 8 and 10: bounds, exact accounts, changing steps, running out, and the disk."""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
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
from helpers.toy import ROWS, WIDTH, Net, batches, inputs, make_model, run_step, train
from torch import Tensor, nn

from pp_offload import DiskTierError, PipelineOffloadManager
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload._memory.budget import HostBudget
from pp_offload._memory.disk_file import DiskFile
from pp_offload.errors import ClosedError
from pp_offload.testing import SimulatedBackend
from pp_offload.testing.streams import SimulatedEvent

PART = ROWS * WIDTH * 4
"""Bytes of one activation."""

KINDS = ("late", "threads")
kinds = pytest.mark.parametrize("kind", KINDS)


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


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.field("F32")
@kinds
@pytest.mark.parametrize("tiers", [("host",), ("host", "disk")], ids=str)
def test_over_the_host_budget_a_group_stays_with_one_warning_or_is_on_disk(
    kind: str, tiers: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = chain(6, False, rows=512)
    y.sum().backward()
    expected, options = gradients(x), dict[str, Any]()
    if "disk" in tiers:
        options = {"tiers": tiers, "disk_dir": tmp_path, "max_in_flight_bytes": 0}
    with session(kind, host_budget_bytes=2**16, **options) as manager:
        for _ in range(3):
            begin_step()
            x, y = chain(6, rows=512)
            y.sum().backward()
            assert_same(gradients(x), expected)
            assert 0 < manager.statistics().host_bytes_peak <= 2**16
            del y
            assert_idle(manager)
        assert (manager.statistics().disk_bytes_read > 0) is ("disk" in tiers)
    about = [text for text in warned(caplog) if "budget" in text]
    assert ["host_budget_bytes" in text for text in about] == [True] * ("disk" not in tiers)


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
    assert len(warned(caplog)) == 1, warned(caplog)


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


# The disk tier: bytes come back as they left, or an error says why not, whatever the disk does


def program(is_on: bool) -> list[Tensor]:
    """Four microbatches, three in flight."""
    return train(Net(), inputs(4), is_on, ahead=3)


def on_disk(kind: str, directory: Path, **options: Any) -> Any:
    """A session whose groups wait at their commit until threads may write."""
    options = {"max_in_flight_bytes": 0, **options}
    return session(kind, tiers=("disk",), disk_dir=directory, **options)


def replaced(step: str, function: Callable[..., Any]) -> Any:
    """Another system call in place of a file's own."""
    return patch.object(DiskFile, step, staticmethod(function))


def fail(number: int) -> Callable[..., int]:
    """A system call that fails."""

    def step(*args: Any) -> int:
        raise OSError(number, os.strerror(number))

    return step


@pytest.mark.parametrize("kind", [*KINDS, "random:1"])
@pytest.mark.parametrize(
    ("tiers", "window", "bound"),
    [
        (("disk",), 0, 0),
        (("disk",), 300, 3000),
        (("disk",), 0, "auto"),
        (("disk",), "auto", "auto"),
        (("host", "disk"), "auto", "auto"),
    ],
)
def test_steps_are_equal(
    kind: str, tiers: tuple[str, ...], window: int | str, bound: int | str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"prefetch_bytes": window, "max_in_flight_bytes": bound}
    if "host" in tiers:
        options["host_budget_bytes"] = 2**16
    check(program, kind, tiers=tiers, disk_dir=tmp_path, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["late", "eager"])
def test_what_passes_through_is_bounded(kind: str, tmp_path: Path) -> None:
    """The commit waits for the disk rather than keep a group, or take more host memory."""
    with on_disk(kind, tmp_path, max_in_flight_bytes=4096) as manager:
        begin_step()
        ys = [group(drawn(64, 8).requires_grad_() * 2, torch.sin) for _ in range(8)]
        assert manager.statistics().bytes_offloaded == 8 * 2048
        for y in ys:
            y.sum().backward()
        assert manager.statistics().host_bytes_peak <= 4096


@contextmanager
def written_groups(kind: str, directory: Path, **options: Any) -> Iterator[tuple[Any, ...]]:
    """A manager, a leaf, and a list of the only output: what two groups saved is on disk alone."""
    with on_disk(kind, directory, **options) as manager:
        begin_step()
        x = drawn(8, 8).requires_grad_()
        outputs = [group(group(x, torch.sin, name="first"), torch.cos, name="second").sum()]
        settle(manager)
        while manager.statistics().bytes_in_flight or manager.statistics().host_bytes_in_use:
            pass  # threads write
        yield manager, x, outputs


def assert_right(x: Tensor, outputs: list[Tensor]) -> None:
    """The gradient; nothing is in use when the graph is gone."""
    got = torch.autograd.grad(outputs, x)
    assert_same(got, torch.autograd.grad(x.sin().cos().sum(), x))
    outputs.clear()
    assert_idle(PipelineOffloadManager.get_instance())


@kinds
def test_what_must_come_back_does_so_above_the_host_budget(kind: str, tmp_path: Path) -> None:
    """Ahead of its use it does not."""
    with written_groups(kind, tmp_path, host_budget_bytes=2**22) as (manager, x, outputs):
        manager.release_idle_memory()
        budget = HostBudget(2**22)
        held = budget.reserve(budget.left_bytes)
        torch.autograd.grad(outputs, x, retain_graph=True)
        assert 0 < manager.statistics().host_bytes_reserved <= 512 and held.nbytes
        assert_right(x, outputs)


@contextmanager
def gate(step: str) -> Iterator[None]:
    """System calls, such as writes, wait until the end."""
    is_open, call = threading.Event(), getattr(DiskFile, step)

    def wait(*args: Any) -> Any:
        assert is_open.wait(60)
        return call(*args)

    with replaced(step, wait):
        try:
            yield
        finally:
            is_open.set()


@kinds
def test_what_is_being_written_comes_back_at_once(kind: str, tmp_path: Path) -> None:
    with session(kind, tiers=("disk",), disk_dir=tmp_path) as manager, gate("_pwrite"):
        begin_step()
        assert_same(program(True), program(False))
        assert manager.statistics().disk_bytes_read == 0
        assert manager.statistics().disk_bytes_in_use == 0, "though threads still write"


@kinds
def test_a_full_disk_keeps_tensors_and_warns_once(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "pp_offload")
    expected = program(False)
    with on_disk(kind, tmp_path) as manager:
        with replaced("_pwrite", fail(errno.ENOSPC)):
            for _ in range(3):
                begin_step()
                assert_same(program(True), expected)
        texts = list(caplog.messages)
        assert sum("could not be written" in text for text in texts) == 1
        for part in (str(tmp_path), "offset 0", os.strerror(errno.ENOSPC), "set disk_dir"):
            assert part in texts[0]
        assert len(texts) <= 2, "one of the disk, one of the first group that stays"
        assert manager.statistics().disk_bytes_in_use == 0
        before = manager.statistics().disk_bytes_written
        begin_step()  # which tries again
        assert_same(program(True), expected)
        assert manager.statistics().disk_bytes_written > before
        assert_idle(manager)


@kinds
@pytest.mark.parametrize("is_ahead", [False, True], ids=["on demand", "ahead"])
def test_what_cannot_be_read_raises_and_is_read_again(
    kind: str, is_ahead: bool, tmp_path: Path
) -> None:
    window = 10**6 if is_ahead else 0
    with written_groups(kind, tmp_path, prefetch_bytes=window) as (_, x, outputs):
        with replaced("_pread", fail(errno.EIO)):
            for _ in range(2):
                with pytest.raises(DiskTierError, match="Input/output"):
                    torch.autograd.grad(outputs, x, retain_graph=True)
        assert_right(x, outputs)


@kinds
def test_a_flipped_bit_is_never_a_gradient(kind: str, tmp_path: Path) -> None:
    write = DiskFile._pwrite

    def flip(fd: int, view: memoryview, offset: int) -> int:
        changed = bytearray(view)
        changed[len(changed) // 2] ^= 1
        return write(fd, memoryview(changed), offset)

    with replaced("_pwrite", flip), written_groups(kind, tmp_path) as (_, x, outputs):
        with pytest.raises(DiskTierError, match="checksum"):
            torch.autograd.grad(outputs, x)


def test_memory_of_an_interrupted_read_is_not_given_to_others(tmp_path: Path) -> None:
    """The thread writes to it, though nobody got the event to wait for."""
    read_into = DiskFile.read_into

    def interrupted(*args: Any, **options: Any) -> None:
        read_into(*args, **options)
        raise KeyboardInterrupt

    with written_groups("threads", tmp_path, prefetch_bytes=0) as (manager, x, outputs):
        with gate("_pread"), patch.object(DiskFile, "read_into", interrupted):
            with pytest.raises(KeyboardInterrupt):
                torch.autograd.grad(outputs, x, retain_graph=True)
            outputs.clear()
            gc.collect()
            assert manager.statistics().host_bytes_in_use == x.nbytes


def test_refused_reads_take_no_host_memory(tmp_path: Path) -> None:
    with written_groups("threads", tmp_path, prefetch_bytes=0) as (manager, x, outputs):
        manager.offloader.engine.mover.tier.disk.close()
        with pytest.raises(ClosedError):
            torch.autograd.grad(outputs, x)
        gc.collect()
        assert manager.statistics().host_bytes_in_use == 0


def test_managers_that_go_leave_no_thread_and_no_file(tmp_path: Path) -> None:
    gc.collect()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        for _ in range(20):
            with on_disk("cpu", tmp_path) as manager:
                begin_step()
                x = drawn(8, 8).requires_grad_()
                group(x, torch.sin).sum().backward()
            del manager
    finally:
        gc.enable()
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= files
