"""A group: open, then offloaded or kept; tags in, tensors out."""

from __future__ import annotations

import pytest
import torch
from conftest import on_two_backends

from pp_offload import (
    ChunkOffloadHandler,
    GroupStateError,
    OffloadTensorGroup,
    PipelineOffloadManager,
)
from pp_offload._core.group import GroupState
from pp_offload.backends import Event


class SpyStream:
    """Remembers what it was asked to wait for."""

    def __init__(self) -> None:
        self.waits: list[Event] = []
        self.records: list[Event] = []

    def wait_event(self, event: Event) -> None:
        self.waits.append(event)

    def record_event(self) -> Event:
        self.records.append(object())  # type: ignore[arg-type]
        return self.records[-1]


@pytest.mark.parametrize("after", [GroupState.OFFLOADED, GroupState.KEPT])
@pytest.mark.parametrize("before", [GroupState.OFFLOADED, GroupState.KEPT])
def test_a_group_is_closed_once(before: GroupState, after: GroupState) -> None:
    group = OffloadTensorGroup("mlp")
    group.move_to(before)
    with pytest.raises(GroupStateError) as error:
        group.move_to(after)
    message = str(error.value)
    assert "'mlp'" in message
    assert before.value in message
    assert after.value in message
    assert group.state is before


@pytest.mark.parametrize("tag", [0, "tag", (1, 2)])
def test_a_pushed_tensor_is_popped_by_its_tag_once(tag: object) -> None:
    group = OffloadTensorGroup("mlp")
    tensor, other = torch.ones(2), torch.zeros(2)
    group.push_tensor(tag, tensor)
    group.push_tensor("other", other)
    assert group.pop_tensor(tag) is tensor
    with pytest.raises(GroupStateError, match="'mlp'") as error:
        group.pop_tensor(tag)
    assert repr(tag) in str(error.value)
    assert group.pop_tensor("other") is other


def test_a_committed_group_holds_no_tensor() -> None:
    group = OffloadTensorGroup("mlp")
    group.push_tensor(1, torch.ones(2))
    group.move_to(GroupState.KEPT)
    with pytest.raises(GroupStateError, match="kept"):
        group.pop_tensor(1)


def test_info_counts_tensors_and_bytes() -> None:
    group = OffloadTensorGroup("mlp")
    group.update_offload_info(torch.ones(3))
    group.update_offload_info(torch.ones(5, dtype=torch.bfloat16))
    assert group.total_tensor_count == 2
    assert group.total_offload_bytes == 3 * 4 + 5 * 2


@pytest.mark.parametrize("kind", ["offload", "reload"])
def test_an_event_recorded_on_one_stream_is_waited_for_by_another(kind: str) -> None:
    group = OffloadTensorGroup("mlp")
    copying, compute = SpyStream(), SpyStream()
    other = "reload" if kind == "offload" else "offload"
    getattr(group, f"record_{kind}_event")(copying)
    getattr(group, f"wait_{other}_event")(compute)
    assert not compute.waits, "the events are not confused"
    getattr(group, f"wait_{kind}_event")(compute)
    assert compute.waits == copying.records
    assert len(compute.waits) == 1


def chunk_of(manager: PipelineOffloadManager) -> ChunkOffloadHandler:
    manager.init_model_chunk_offload_handler(None, None, 1)
    chunk = manager.cur_forward_chunk()
    assert chunk is not None
    return chunk


@on_two_backends
def test_tensors_outlive_a_dropped_group(manager: PipelineOffloadManager) -> None:
    chunk = chunk_of(manager)
    group = chunk.on_group_start_forward("mlp")
    tag = chunk.pack(group, torch.arange(9.0, device=manager.backend.device))
    chunk.on_group_commit_forward(None)
    chunk.reset()
    assert torch.equal(chunk.tensor_pop(tag), torch.arange(9.0, device=manager.backend.device))


@on_two_backends
def test_an_empty_group_is_committed_without_a_copy(manager: PipelineOffloadManager) -> None:
    chunk = chunk_of(manager)
    group = chunk.on_group_start_forward("mlp")
    chunk.on_group_commit_forward(None)
    assert group.state is not GroupState.OPEN
    assert group.copied_bytes == 0
    assert manager.statistics().bytes_offloaded == 0
