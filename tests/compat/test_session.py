"""``configure`` and ``use_backend``: one manager stays the manager, whatever its options become."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers.toy import batches, make_model, run_step, same_bits

from pp_offload import (
    DiskTierError,
    GroupStateError,
    OffloadConfig,
    PipelineOffloadManager,
    configure,
    offload_modules,
)
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface

SMALL = OffloadConfig(min_offloaded_tensor_size=1)
OTHER = OffloadConfig(min_offloaded_tensor_size=1, prefetch_bytes=0)


def device_of(manager: PipelineOffloadManager) -> str:
    return str(manager.backend.device)


def step(manager: PipelineOffloadManager) -> list[torch.Tensor]:
    device = device_of(manager)
    return run_step(make_model(device=device), [x.to(device) for x in batches(3)])


def test_steps_begin_anew(manager: PipelineOffloadManager) -> None:
    expected = step(manager)
    moved = manager.statistics().bytes_offloaded
    assert same_bits(step(manager), expected)
    assert manager.statistics().bytes_offloaded < 2 * moved, "the plan keeps the last groups"
    configure(OTHER)
    assert manager.statistics().bytes_offloaded == 0
    assert same_bits(step(manager), expected)
    assert manager.statistics().bytes_offloaded == moved, "there is no plan yet"


def test_a_graph_of_before_stays_good(manager: PipelineOffloadManager) -> None:
    x = torch.linspace(-1, 1, 40).to(manager.backend.device).requires_grad_()
    (expected,) = torch.autograd.grad((x * 1).sin().sum(), x)
    off_interface.init_chunk_handler(None, None, 1)
    h = x * 1
    with off_interface(True, h, "g"):
        y = h.sin()
    loss = off_interface.group_commit(y, name="g").sum()
    del h, y
    configure(OTHER)
    step(manager)
    assert same_bits([expected], torch.autograd.grad(loss, x))


def test_a_forward_that_runs_does_not_go_on_with_the_old_options(
    manager: PipelineOffloadManager,
) -> None:
    """Neither on the thread that changes them nor on another."""
    off_interface.init_chunk_handler(None, None, 1)
    other = threading.Thread(target=configure, args=(OTHER,))
    other.start()
    other.join()
    x = torch.ones(4, device=manager.backend.device)
    with pytest.raises(GroupStateError, match="without a chunk"), off_interface(True, x, "g"):
        pass
    assert manager.cur_forward_chunk() is None


def test_what_was_said_of_tensors_and_groups_stays_said(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    marked = torch.ones(30, device=manager.backend.device)
    manager.mark_not_offloadable(marked)
    manager.disable_offload()
    with offload_modules(torch.nn.Sequential(torch.nn.Tanh()), {"idle": "0"}):
        configure(OTHER)
        assert not manager.offloader.engine.eligibility.admits(marked, 1)
        step(manager)
        assert manager.statistics().bytes_offloaded == 0
        manager.enable_offload()
        manager.reset()
        step(manager)
        manager.reset()
    assert [record.getMessage()[:36] for record in caplog.records] == [
        "pp_offload: group 'idle' never ran: "
    ]


def test_options_that_cannot_be_had_leave_all_as_it_was(
    manager: PipelineOffloadManager, tmp_path
) -> None:
    step(manager)
    manager.reset()
    summary, before = manager.offload_summary_bytes, manager.config
    (tmp_path / "no-directory").touch()
    with pytest.raises(DiskTierError, match="no-directory"):
        configure(OffloadConfig(tiers=("disk",), disk_dir=tmp_path / "no-directory"))
    assert manager.config == before
    assert manager.offload_summary_bytes == summary != {}
    step(manager)
    assert manager.statistics().bytes_offloaded > 0
