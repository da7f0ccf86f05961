"""Delayed commits are done in forward order when flushed, or at the next step, if still of use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.processes import HANG_S
from helpers.toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    GroupStateError,
    PipelineOffloadManager,
    fine_grained_offloading_group_flush_delayed_groups,
    fine_grained_offloading_group_start,
)
from pp_offload._core.group import Group
from pp_offload._core.observer import Observer


def test_a_flush_offloads_in_forward_order(manager: PipelineOffloadManager) -> None:
    device = manager.backend.device
    x = torch.linspace(0, 1, 30).to(device).requires_grad_()
    manager.init_model_chunk_offload_handler(None, None, 1)
    y, moved, closed = x * 1, [], []

    class Closed(Observer):
        def closed(self, group: Group, payloads: object) -> None:
            closed.append(group.name)

    manager.offloader.observers.add(Closed())
    for name in ("first", "second"):
        with off_interface(True, y, name):
            y = y.sin()
        y = off_interface.group_commit(y, name=name, delay_offload=True)
        moved.append(manager.statistics().bytes_offloaded)
    fine_grained_offloading_group_flush_delayed_groups()
    moved.append(manager.statistics().bytes_offloaded)
    assert moved == [0, 0, 240] and closed == ["first", "second"]
    chunk = manager.cur_forward_chunk()
    assert chunk is not None
    assert [group.counts.copied_bytes for group in chunk.groups] == [120, 120]
    (got,) = torch.autograd.grad(y.sum(), x)
    assert same_bits([got], list(torch.autograd.grad((x * 1).sin().sin().sum(), x)))


def test_a_commit_after_backward_moves_nothing(manager: PipelineOffloadManager) -> None:
    device = manager.backend.device
    x, weight = torch.ones(30).to(device), torch.ones(30).to(device).requires_grad_()
    manager.init_model_chunk_offload_handler(None, None, 1)
    with off_interface(True, x, "g"):
        y = (x * weight).exp()
    off_interface.group_commit(y, name="g", delay_offload=True).sum().backward()
    x.add_(1)  # the next batch, into the same memory
    manager.reset()
    assert manager.statistics().bytes_offloaded == 0
    manager.init_model_chunk_offload_handler(None, None, 1)


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_delayed_release_keeps_nothing_alive(
    manager: PipelineOffloadManager, is_dropped: bool
) -> None:
    """What is to be released refers to the graph, and the queue must not."""
    device = manager.backend.device
    x = torch.linspace(0, 1, 30).to(device).requires_grad_()
    manager.init_model_chunk_offload_handler(None, None, 1)
    y = x * 1
    with off_interface(True, y, "early"):
        y = y.sin()
    middle = off_interface.group_commit(y, name="early") * 1
    with off_interface(True, middle, "late"):
        y = middle.sin()
    y = off_interface.group_commit(
        y, name="late", forced_released_tensors=[middle], delay_offload=True
    )
    if is_dropped:
        del y, middle
        assert manager.statistics().live_tensors == 0
        fine_grained_offloading_group_flush_delayed_groups()
        assert_idle(manager)
        return
    fine_grained_offloading_group_flush_delayed_groups()
    manager.backend.synchronize()
    manager.statistics()
    assert middle.untyped_storage().nbytes() == 0
    (got,) = torch.autograd.grad(y.sum(), x)
    assert same_bits([got], list(torch.autograd.grad((x * 1).sin().sin().sum(), x)))


def test_a_delayed_commit_that_raises_ends_the_step_all_the_same(
    manager: PipelineOffloadManager,
) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError

    manager.init_model_chunk_offload_handler(None, None, 1)
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
        manager.init_model_chunk_offload_handler(None, None, 1)
        fine_grained_offloading_group_start(torch.ones(3, device=manager.backend.device), "g")

    with ThreadPoolExecutor(1) as worker:
        manager.push_offload_groups(lambda _: worker.submit(forward).result(HANG_S), None)
        with pytest.raises(GroupStateError, match="waits for its backward"):
            manager.reset()
        assert manager.step.num_chunks == 1
