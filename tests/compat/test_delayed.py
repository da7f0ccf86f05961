"""Delayed commits are done in forward order when flushed, or at the next step, if still of use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.processes import HANG_S
from helpers.scenarios import begin
from helpers.sessions import assert_idle, gradients, group
from helpers.toy import same_bits
from torch import Tensor

from pp_offload import GroupStateError, PipelineOffloadManager
from pp_offload import fine_grained_offloading_group_flush_delayed_groups as flush
from pp_offload import fine_grained_offloading_group_start as group_start
from pp_offload._core.group import Group
from pp_offload._core.observers import Observer


@pytest.fixture
def x(manager: PipelineOffloadManager) -> Tensor:
    """An input of a microbatch that has begun."""
    begin()
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
    begin()


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
        begin()
        group_start(torch.ones(3, device=manager.backend.device), "g")

    with ThreadPoolExecutor(1) as worker:
        manager.push_offload_groups(lambda _: worker.submit(forward).result(HANG_S), None)
        with pytest.raises(GroupStateError, match="waits for its backward"):
            manager.reset()
        assert manager.step.num_chunks == 1
