"""One manager stays the manager, whatever its options become; commits of it that are delayed, and
calls one by one.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import on_two_backends
from helpers.processes import HANG_S
from helpers.sessions import assert_idle, begin_microbatch, gradients, group
from helpers.toy import batches, make_model, run_step, same_bits
from torch import Tensor

from pp_offload import (
    DiskTierError,
    GroupStateError,
    OffloadConfig,
    PipelineOffloadManager,
    configure,
    offload_modules,
)
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import fine_grained_offloading_group_flush_delayed_groups as flush
from pp_offload import fine_grained_offloading_group_start as group_start
from pp_offload._core.group import Group
from pp_offload._core.observers import Observer

pytestmark = on_two_backends

OTHER = OffloadConfig(min_offloaded_tensor_size=1, prefetch_bytes=0)


def step(manager: PipelineOffloadManager) -> list[Tensor]:
    device = manager.backend.device
    return run_step(make_model(device=str(device)), [x.to(device) for x in batches(3)])


def test_steps_begin_anew_and_a_graph_of_before_stays_good(manager: PipelineOffloadManager) -> None:
    expected = step(manager)
    moved = manager.statistics().bytes_offloaded
    assert manager.offload_summary_bytes == {}
    manager.post_warmup_callback()
    assert manager.offload_summary_bytes != {}
    assert same_bits(step(manager), expected)
    assert manager.statistics().bytes_offloaded < 2 * moved, "the plan keeps the last groups"
    begin_microbatch()
    x = torch.linspace(-1, 1, 40).to(manager.backend.device).requires_grad_()
    loss = group(x * 1, torch.sin).sum()
    configure(OTHER)
    assert manager.statistics().bytes_offloaded == 0
    assert same_bits(step(manager), expected)
    assert manager.statistics().bytes_offloaded == moved, "there is no plan yet"
    got = torch.autograd.grad(loss, x)
    assert same_bits(got, torch.autograd.grad((x * 1).sin().sum(), x))


def test_a_forward_that_runs_does_not_go_on_with_the_old_options(
    manager: PipelineOffloadManager,
) -> None:
    """Neither on the thread that changes them nor on another."""
    begin_microbatch()
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


# Delayed commits are done in forward order when flushed, or at the next step, if still of use


@pytest.fixture
def x(manager: PipelineOffloadManager) -> Tensor:
    """An input of a microbatch that has begun."""
    begin_microbatch()
    return torch.linspace(0, 1, 30).to(manager.backend.device).requires_grad_()


def test_a_flush_offloads_in_forward_order(manager: PipelineOffloadManager, x: Tensor) -> None:
    y, moved, closed = x * 1, [], []

    class Closed(Observer):
        def closed(self, group: Group, payloads: object) -> None:
            closed.append(group.name)

    manager.offloader.observers.add(Closed())
    for name in ("first", "second"):
        y = group(y, torch.sin, name=name, delay_offload=True)
        moved.append(manager.statistics().bytes_offloaded)
    flush()
    moved.append(manager.statistics().bytes_offloaded)
    assert moved == [0, 0, 240] and closed == ["first", "second"]
    y.sum().backward()
    assert same_bits(gradients(x), torch.autograd.grad((x * 1).sin().sin().sum(), x))


def test_a_commit_after_backward_moves_nothing(manager: PipelineOffloadManager, x: Tensor) -> None:
    batch = torch.ones_like(x)
    group(batch, lambda h: (h * x).exp(), delay_offload=True).sum().backward()
    batch.add_(1)  # the next batch, into the same memory
    manager.reset()
    assert manager.statistics().bytes_offloaded == 0
    begin_microbatch()


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_delayed_release_keeps_nothing_alive(
    manager: PipelineOffloadManager, x: Tensor, is_dropped: bool
) -> None:
    """What is to be released refers to the graph, and the queue must not."""
    middle = group(x * 1, torch.sin, name="early") * 1
    y = group(middle, torch.sin, name="late", forced_released_tensors=[middle], delay_offload=True)
    if is_dropped:
        del y, middle
        assert manager.statistics().live_tensors == 0
        flush()
        assert_idle(manager)
        return
    flush()
    manager.backend.synchronize()
    manager.statistics()
    assert middle.untyped_storage().nbytes() == 0
    y.sum().backward()
    assert same_bits(gradients(x), torch.autograd.grad((x * 1).sin().sin().sum(), x))


def test_a_delayed_commit_that_raises_ends_the_step_all_the_same(
    manager: PipelineOffloadManager, x: Tensor
) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError

    for _ in range(2):  # the other is of the same step, and goes with it
        manager.push_offload_groups(fail, None)
    with pytest.raises(ZeroDivisionError):
        manager.reset()
    assert manager.cur_forward_chunk() is None
    manager.reset()


def test_a_forward_that_begins_amid_a_reset_is_not_forgotten(
    manager: PipelineOffloadManager,
) -> None:
    """On another thread, while the delayed groups are committed."""

    def forward() -> None:
        begin_microbatch()
        group_start(torch.ones(3, device=manager.backend.device), "g")

    with ThreadPoolExecutor(1) as worker:
        manager.push_offload_groups(lambda _: worker.submit(forward).result(HANG_S), None)
        with pytest.raises(GroupStateError, match="waits for its backward"):
            manager.reset()
        assert manager.step.num_chunks == 1


# Older calls one by one: a chunk driven by hand, and single tensors


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_groups_leave_and_come_back(
    manager: PipelineOffloadManager, chunk: Any, by_name: bool, early: bool
) -> None:
    device = manager.backend.device
    assert chunk is manager.pop_forward_chunk("any")
    with pytest.raises(GroupStateError, match="commit without an open group"):
        chunk.on_group_commit_forward(None)
    tags = {}
    for name in ("attn", "mlp"):
        group = chunk.on_group_start_forward(name)
        assert chunk.find_next_group(name) is group is chunk.find_next_group()
        tags[name] = [chunk.tensor_push(torch.ones(3, 3, device=device) * i) for i in range(3)]
        assert chunk.should_bulk_offload()
        if by_name:
            chunk.on_group_commit_forward(None)
        else:
            chunk.bulk_offload_group()
        assert (group.counts.num_tensors, group.counts.nbytes) == (3, 3 * 36)
    assert chunk.get_max_deduplicated_groups() == 2
    assert chunk.find_group_with_name("mlp", 1) is group
    manager.backend.synchronize()
    manager.statistics()  # lets go of sources; else they are taken back, without a reload
    if early:
        chunk.pre_reload_last_layer()
        assert not group.wanted()
    for name in ("mlp", "attn"):
        if by_name:
            chunk.on_group_commit_backward(name)
        else:
            chunk.bulk_reload_group()
        assert manager.cur_backward_chunk() is chunk
        expected = [torch.ones(3, 3) * i for i in range(3)]
        assert same_bits([chunk.tensor_pop(tag).cpu() for tag in tags.pop(name)], expected)
    assert manager.statistics().bytes_reloaded > 0
    assert_idle(manager)


def test_a_tensor_leaves_and_comes_back(manager: PipelineOffloadManager, chunk: Any) -> None:
    values = torch.ones(3, 3, device=manager.backend.device) * 2
    leaves, stays = chunk.offload(values), chunk.offload(torch.nn.Parameter(values))
    assert manager.statistics().bytes_offloaded == values.nbytes
    for state in (leaves, leaves, stays):
        assert same_bits([chunk.reload(state).cpu()], [torch.ones(3, 3) * 2])


def test_what_a_caller_may_count_and_pool(manager: PipelineOffloadManager, chunk: Any) -> None:
    assert chunk.is_empty_chunk()
    group = chunk.on_group_start_forward("mlp")
    group.update_offload_info(torch.ones(4))
    assert (group.counts.num_tensors, group.counts.nbytes) == (1, 16)
    backend, pool = manager.backend, manager.cpu_tensor_pool
    assert (manager.d2h_stream, manager.h2d_stream) == (backend.d2h, backend.h2d)
    host: Tensor = pool.allocate((3, 2), torch.float16)
    assert host.device.type == "cpu" and manager.cpu_tensor_pool is pool
    pool.free(host)
