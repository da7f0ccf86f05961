"""``configure`` and ``use_backend``: one manager stays the manager, whatever its options become."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from conftest import on_two_backends
from helpers.scenarios import begin
from helpers.sessions import group
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

pytestmark = on_two_backends

OTHER = OffloadConfig(min_offloaded_tensor_size=1, prefetch_bytes=0)


def step(manager: PipelineOffloadManager) -> list[torch.Tensor]:
    device = manager.backend.device
    return run_step(make_model(device=str(device)), [x.to(device) for x in batches(3)])


def test_steps_begin_anew(manager: PipelineOffloadManager) -> None:
    expected = step(manager)
    moved = manager.statistics().bytes_offloaded
    assert manager.offload_summary_bytes == {}
    manager.post_warmup_callback()
    assert manager.offload_summary_bytes != {}
    assert same_bits(step(manager), expected)
    assert manager.statistics().bytes_offloaded < 2 * moved, "the plan keeps the last groups"
    configure(OTHER)
    assert manager.statistics().bytes_offloaded == 0
    assert same_bits(step(manager), expected)
    assert manager.statistics().bytes_offloaded == moved, "there is no plan yet"


def test_a_graph_of_before_stays_good(manager: PipelineOffloadManager) -> None:
    x = torch.linspace(-1, 1, 40).to(manager.backend.device).requires_grad_()
    begin()
    loss = group(x * 1, torch.sin).sum()
    configure(OTHER)
    step(manager)
    got = torch.autograd.grad(loss, x)
    assert same_bits(got, torch.autograd.grad((x * 1).sin().sum(), x))


def test_a_forward_that_runs_does_not_go_on_with_the_old_options(
    manager: PipelineOffloadManager,
) -> None:
    """Neither on the thread that changes them nor on another."""
    begin()
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
    manager: PipelineOffloadManager, tmp_path: Path
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
