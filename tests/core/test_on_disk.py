"""The disk tier: bytes come back as they left, or an error says why not, whatever the disk does."""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.nets import Net, inputs, train
from helpers.sessions import (
    assert_idle,
    assert_same,
    begin_step,
    check,
    drawn,
    gradients,
    group,
    session,
    settle,
)
from torch import Tensor

from pp_offload import DiskTierError, PipelineOffloadManager
from pp_offload._memory.budget import HostBudget
from pp_offload._memory.disk_file import DiskFile
from pp_offload.errors import ClosedError

KINDS = ("late", "threads")
kinds = pytest.mark.parametrize("kind", KINDS)


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


@kinds
def test_the_disk_takes_what_is_over_the_host_budget(kind: str, tmp_path: Path) -> None:
    xs = [drawn(512, 8, seed=seed).requires_grad_() for seed in range(5)]

    def large(is_on: bool) -> list[Tensor]:
        ys = [group(x * 2, torch.sin, is_on) for x in xs]
        for y in reversed(ys):
            y.sum().backward()
        return gradients(*xs)

    options: dict[str, Any] = {"tiers": ("host", "disk"), "host_budget_bytes": 2**16}
    with session(kind, disk_dir=tmp_path, max_in_flight_bytes=0, **options) as manager:
        begin_step()
        assert_same(large(True), large(False))
        statistics = manager.statistics()
        assert 0 < statistics.host_bytes_peak <= 2**16
        assert statistics.disk_bytes_read > 0
        assert_idle(manager)


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
