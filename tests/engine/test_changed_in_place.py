"""What was changed in place is refused where autograd refuses it: when backward asks for it.

Also where a disk has refused the bytes, so that they are in the sources alone.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.sessions import begin_step, group, session, settle, unseen
from torch import Tensor
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager, SavedTensorModifiedError, use_backend
from pp_offload._common.workers import Workers
from pp_offload._memory.disk_file import DiskFile
from pp_offload.testing import SimulatedBackend


@pytest.mark.parametrize("is_delayed", [False, True], ids=["at once", "delayed"])
def test_a_changed_tensor_harms_only_who_asks_for_it(
    manager: PipelineOffloadManager, is_delayed: bool
) -> None:
    """Its group is committed, the others of the group leave, and no step fails for its sake."""
    x = torch.linspace(-1, 1, 12).view(3, 4).to(manager.backend.device).requires_grad_()
    manager.reset()
    manager.init_model_chunk_offload_handler(None, None, 1)
    changed, other = x * 2, x * 3
    with off_interface(True, x, "core"):
        unused, used = changed.sin(), other.sin()
        changed.add_(1)
    off_interface.group_commit(used, name="core", delay_offload=is_delayed)
    if is_delayed:
        manager.reset()
    assert manager.statistics().bytes_offloaded == other.nbytes
    (got,) = torch.autograd.grad(used.sum(), x)
    assert same_bits([got], list(torch.autograd.grad((x * 3).sin().sum(), x)))
    with pytest.raises(SavedTensorModifiedError, match=r"(?s)\(3, 4\).*core"):
        unused.sum().backward()
    manager.reset()
    del unused, used
    torch.ones((), requires_grad=True).backward()  # autograd forgets the backward that failed
    assert_idle(manager)


SAVED: dict[str, Callable[[Tensor], Tensor]] = {
    "a whole storage": lambda y: y.sin(),
    "views of a storage": lambda y: y[:2].sin() * y[2:].sin(),
    "rows of a storage": lambda y: y[1:3].sin(),
    "columns of a storage": lambda y: y[:, :2].sin(),  # gathered, so a change does no harm
}


def refuse(*call: object) -> int:
    """A system call to a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def wait_for_copies(manager: PipelineOffloadManager) -> None:
    """Also for those that threads make."""
    settle(manager)
    for leaving in tuple(manager.offloader.engine.mover.in_flight.queue):
        leaving.offloaded.synchronize()
    settle(manager)


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("kind", ["cpu", "late", "eager"])
def test_what_the_disk_refused_and_somebody_changes(
    kind: str, saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change after the bytes have left does no harm: they are in host memory."""
    monkeypatch.setattr(DiskFile, "_pwrite", staticmethod(refuse))
    with session(kind, tiers=("disk",), disk_dir=tmp_path) as manager:
        x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        (expected,) = torch.autograd.grad(SAVED[saved](x * 2).sum(), x)
        begin_step()
        y = x * 2
        loss = group(y, SAVED[saved], name="core").sum()
        wait_for_copies(manager)
        with torch.no_grad():
            y.add_(1)
        assert same_bits(torch.autograd.grad(loss, x), [expected])
        del loss
        manager.reset()
        assert_idle(manager)


@pytest.mark.parametrize("window", [0, "auto"])
def test_what_the_disk_refuses_at_once_is_there(
    window: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a narrow window would have it read ahead."""
    monkeypatch.setattr(DiskFile, "_pwrite", staticmethod(refuse))
    monkeypatch.setattr(Workers, "queue", lambda workers, piece: piece.run())
    with session("cpu", tiers=("disk",), disk_dir=tmp_path, prefetch_bytes=window):
        begin_step()
        x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        y = group(group(x * 2, torch.sin, name="first"), torch.cos, name="second")
        got = torch.autograd.grad(y.sum(), x)
        assert same_bits(got, torch.autograd.grad((x * 2).sin().cos().sum(), x))


@pytest.mark.parametrize("kind", ["cpu", "threads", "late", "eager"])
def test_changed_while_it_waits_to_be_written(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread has not written yet, or has and found it changed: no gradient is of the change."""
    gate, write = threading.Event(), DiskFile._pwrite

    def write_late(*call: Any) -> int:
        gate.wait()
        return write(*call)

    monkeypatch.setattr(DiskFile, "_pwrite", staticmethod(write_late))
    with session(kind, tiers=("disk",), disk_dir=tmp_path, max_in_flight_bytes=10**9) as manager:
        begin_step()
        x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        h = x * 1
        loss = group(h, torch.sin, name="core").sum()
        with unseen(manager.backend):
            h.mul_(2)
        gate.set()
        wait_for_copies(manager)
        try:
            (got,) = torch.autograd.grad(loss, x)
        except SavedTensorModifiedError as error:
            assert "'core'" in str(error)
        else:
            assert same_bits([got], torch.autograd.grad(x.sin().sum(), x))


def test_of_what_the_disk_refused_a_part_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the large tensor that it was gathered from."""
    monkeypatch.setattr(DiskFile, "_pwrite", staticmethod(refuse))
    with session("cpu", tiers=("disk",), disk_dir=tmp_path) as manager:
        x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        begin_step()
        y = x * 2
        loss = group(y, lambda y: y[:, :2].sin()).sum()
        wait_for_copies(manager)
        storage = weakref.ref(y.untyped_storage())
        del y
        assert storage() is None
        (expected,) = torch.autograd.grad((x * 2)[:, :2].sin().sum(), x)
        assert same_bits(torch.autograd.grad(loss, x), [expected])


def test_each_view_of_a_storage_is_watched() -> None:
    """Those of ``data`` count their changes apart."""
    backend = SimulatedBackend(order="late")
    with use_backend(backend) as manager:
        x = torch.linspace(-1, 1, 12).to(manager.backend.device).requires_grad_()
        manager.init_model_chunk_offload_handler(None, None, 1)
        y = x * 2
        apart = y.data.requires_grad_()
        with off_interface(True, y, "core"):
            z = y.sin() + apart.cos()
        loss = off_interface.group_commit(z, name="core").sum()
        # The simulated device would report the race itself; here the engine alone must notice.
        with unseen(backend), torch.no_grad():
            apart.add_(1)
        with pytest.raises(SavedTensorModifiedError, match=r"group 'core'"):
            torch.autograd.grad(loss, x)


def test_a_change_is_seen_on_another_stream_than_that_of_the_commit() -> None:
    """Which cannot take the source back, and would get what the copy has made of it."""
    backend = SimulatedBackend(order="late")
    with use_backend(backend) as manager:
        x = torch.linspace(-1, 1, 12).to(manager.backend.device).requires_grad_()
        manager.init_model_chunk_offload_handler(None, None, 1)
        main, side = backend.current_stream(), backend.new_stream("side")
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
        with (
            backend.stream(side),
            pytest.raises(SavedTensorModifiedError, match=r"group 'core'"),
        ):
            torch.autograd.grad(loss, x)


@pytest.mark.parametrize("kind", ["late", "random", "threads"])
def test_a_view_that_another_group_shares_is_watched(kind: str) -> None:
    """It counts its changes apart, and its bytes left with the copy of the first group."""
    with session(kind) as manager:
        begin_step()
        x, w = (torch.linspace(-1, 1, 2**16).requires_grad_() for _ in "xw")
        y = x * 2
        apart = y.data
        first = group(y, torch.sin, name="first")
        loss = group(apart, lambda apart: apart * w, name="second").sum()
        with unseen(manager.backend), torch.no_grad():
            apart.add_(1)
        try:
            (got,) = torch.autograd.grad(loss + first.sum(), w)
        except SavedTensorModifiedError:
            return
        assert same_bits([got], [x.detach() * 2])
