"""What the disk tier's threads still use is nobody else's, and they end with their manager."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.sessions import assert_same, begin_step, drawn, group, session, settle
from processes import HANG_S
from torch import Tensor

from pp_offload._memory.disk_file import DiskFile


class Gate:
    """System calls that wait until it is open.

    Args:
        step: Which ones, such as ``_pwrite``.
        monkeypatch: Puts it there.
        end: In the file; what is behind this does not wait.
    """

    def __init__(self, step: str, monkeypatch: pytest.MonkeyPatch, end: int = 2**60) -> None:
        self._open, call = threading.Event(), getattr(DiskFile, step)
        self.open = self._open.set

        def wait(fd: int, parts: Any, at: int) -> int:
            assert at >= end or self._open.wait(HANG_S)
            done: int = call(fd, parts, at)
            return done

        monkeypatch.setattr(DiskFile, step, staticmethod(wait))


def read_ahead(manager: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor, Gate, Any]:
    """Two groups on disk, of which a thread reads the first one ahead.

    Returns:
        The outputs of both, the gate that the read waits at, and the end of the read.
    """
    begin_step()
    first = group(drawn(8, 8).requires_grad_(), torch.sin, name="first")
    second = group(first, torch.cos, name="second")
    written(manager)
    gate = Gate("_pread", monkeypatch, end=1)  # the second one is at the begin of the file
    torch.autograd.grad(second.sum(), first)
    (event,) = [read.event for read in manager.offloader.engine.mover.tier.reads]
    return first, second, gate, event


def written(manager: Any) -> None:
    """Wait until all is on disk alone."""
    settle(manager)
    while manager.statistics().host_bytes_in_use:
        pass  # threads write


def test_memory_that_a_thread_reads_to_is_not_given_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read ahead is dropped meanwhile, and a group leaves that would fit there."""
    with session("eager", tiers=("disk",), disk_dir=tmp_path, prefetch_bytes=10**6) as manager:
        h, y, reads, event = read_ahead(manager, monkeypatch)
        del h, y
        writes = Gate("_pwrite", monkeypatch)
        x = drawn(8, 8, seed=2).requires_grad_()
        z = group(x * 2, torch.sin, name="third").sum()
        settle(manager)
        reads.open()
        event.synchronize()
        (got,) = torch.autograd.grad(z, x)  # from host memory, for it is not yet written
        writes.open()
        assert_same([got], torch.autograd.grad((x * 2).sin().sum(), x))


def test_managers_that_go_leave_no_thread_and_no_file(tmp_path: Path) -> None:
    gc.collect()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        for _ in range(20):
            with session("cpu", tiers=("disk",), disk_dir=tmp_path) as manager:
                begin_step()
                x = drawn(8, 8).requires_grad_()
                group(x, torch.sin).sum().backward()
            del manager
    finally:
        gc.enable()
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= files


def test_memory_of_a_read_for_a_graph_that_is_gone_is_free_without_a_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session("eager", tiers=("disk",), disk_dir=tmp_path, prefetch_bytes=10**6) as manager:
        h, y, reads, event = read_ahead(manager, monkeypatch)
        gc.collect()
        gc.disable()
        try:
            del h, y
            reads.open()
            event.synchronize()
            settle(manager)
            assert manager.statistics().host_bytes_in_use == 0
        finally:
            gc.enable()
