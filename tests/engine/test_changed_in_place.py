"""What was changed in place is refused where autograd refuses it: when backward asks for it."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pp_offload._transfer.disk_direct import DirectDisk
from test_disk import disk_manager, disk_of, settle
from torch import Tensor
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager, SavedTensorModifiedError, use_backend
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


def refuse(fd: int, data: memoryview, offset: int) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("kind", ["cpu", "late", "eager"])
def test_what_the_disk_refused_and_somebody_changes(kind: str, saved: str, tmp_path: Path) -> None:
    """A change after the bytes have left does no harm. These have left if they were staged."""
    with disk_manager(kind, tmp_path) as manager:
        x = torch.linspace(-1, 1, 16).view(4, 4).to(manager.backend.device).requires_grad_()
        (expected,) = torch.autograd.grad(SAVED[saved](x * 2).sum(), x)
        engine = manager.offloader.transfer
        disk_of(manager)._pwrite = refuse  # type: ignore[method-assign]
        manager.init_model_chunk_offload_handler(None, None, 1)
        y = x * 2
        with off_interface(True, y, "core"):
            z = SAVED[saved](y)
        loss = off_interface.group_commit(z, name="core").sum()
        while engine.copies.in_flight.queue:
            engine.copies.in_flight.queue[0].event(manager.backend.d2h).synchronize()
            engine.poll()
        with torch.no_grad():
            y.add_(1)
        if isinstance(engine.tiers[-1], DirectDisk) and "columns" not in saved:
            with pytest.raises(SavedTensorModifiedError, match=r"group 'core'"):
                torch.autograd.grad(loss, x)
        else:
            assert same_bits(torch.autograd.grad(loss, x), [expected])
        del loss, z
        torch.ones((), requires_grad=True).backward()  # autograd forgets the backward that failed
        manager.reset()
        assert_idle(manager)


def test_of_what_the_disk_refused_a_part_is_kept(tmp_path: Path) -> None:
    """Not the large tensor that it was gathered from."""
    with disk_manager("cpu", tmp_path) as manager:
        disk_of(manager)._pwrite = refuse  # type: ignore[method-assign]
        x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        manager.init_model_chunk_offload_handler(None, None, 1)
        y = x * 2
        with off_interface(True, y, "core"):
            z = y[:, :2].sin()
        loss = off_interface.group_commit(z, name="core").sum()
        settle(manager)
        storage = weakref.ref(y.untyped_storage())
        del y, z
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
        with backend._inside(), torch.no_grad():
            apart.add_(1)
        with pytest.raises(SavedTensorModifiedError, match=r"group 'core'"):
            torch.autograd.grad(loss, x)
