"""A group: open, then offloaded or kept; tags in, tensors out; and which group a commit closes."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import on_two_backends
from helpers.sessions import assert_no_hooks, assert_same, gradients

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import GroupStateError, OffloadTensorGroup, PipelineOffloadManager
from pp_offload._core.group import GroupState
from pp_offload._megatron.chunk import ChunkOffloadHandler


def test_a_group_is_closed_once() -> None:
    group = OffloadTensorGroup("mlp")
    group.move_to(GroupState.OFFLOADED)
    with pytest.raises(GroupStateError, match="'mlp' is offloaded and cannot become kept"):
        group.move_to(GroupState.KEPT)


def test_a_pushed_tensor_is_popped_by_its_tag_once() -> None:
    group = OffloadTensorGroup("mlp")
    tensor, other = torch.ones(2), torch.zeros(2)
    group.push_tensor((1, 2), tensor)
    group.push_tensor("other", other)
    assert group.pop_tensor((1, 2)) is tensor
    with pytest.raises(KeyError):
        group.pop_tensor((1, 2))
    assert group.pop_tensor("other") is other


@pytest.mark.parametrize(("kind", "other"), [("offload", "reload"), ("reload", "offload")])
def test_an_event_recorded_on_one_stream_is_waited_for_by_another(kind: str, other: str) -> None:
    group, copying, compute = OffloadTensorGroup("mlp"), Mock(), Mock()
    getattr(group, f"record_{kind}_event")(copying)
    getattr(group, f"wait_{other}_event")(compute)
    assert not compute.wait_event.called, "the events are not confused"
    getattr(group, f"wait_{kind}_event")(compute)
    compute.wait_event.assert_called_once_with(copying.record_event())


@on_two_backends
def test_a_group_leaves_when_a_user_of_the_reference_says_so(chunk: ChunkOffloadHandler) -> None:
    x = torch.ones(4, 4).to(chunk.offloader.backend.device)
    saved = chunk.on_group_start_forward("sent").pack(x * 2)
    chunk.bulk_offload_group()
    chunk.on_group_start_forward("empty")
    chunk.on_group_commit_forward(None)
    assert [group.state for group in chunk.groups] == [GroupState.OFFLOADED, GroupState.KEPT]
    assert_same([saved.unpack()], [x * 2])


@on_two_backends
@pytest.mark.parametrize(
    ("left_out", "expected"),
    [
        ("none", [GroupState.OPEN, GroupState.OFFLOADED]),
        ("inner", [GroupState.OPEN]),
        ("outer", [GroupState.OFFLOADED]),
    ],
)
def test_a_group_in_a_group_of_the_same_name(
    left_out: str, expected: list[GroupState], manager: PipelineOffloadManager, chunk: Any
) -> None:
    """The inner commit is the inner group's; offload may be switched for one of them."""
    x = torch.ones(4, 4).to(manager.backend.device).requires_grad_()
    switch = {True: manager.disable_offload, False: manager.enable_offload}
    switch[left_out == "outer"]()
    with off_interface(True, x, "a"):
        switch[left_out == "inner"]()
        with off_interface(True, x, "a"):
            y = x.sin()
        manager.enable_offload()
        off_interface.group_commit(y, name="a")
        assert [group.state for group in chunk.groups] == expected
        assert (manager.statistics().bytes_offloaded == 0) is (left_out == "inner")
    assert_no_hooks()
    off_interface.group_commit(y, name="a")
    assert not chunk.open_groups
    assert all(group.state is not GroupState.OPEN for group in chunk.groups)
    y.sum().backward()
    assert_same(gradients(x), [x.cos()])
