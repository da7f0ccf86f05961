"""A group: open, then offloaded or kept; tags in, tensors out."""

from __future__ import annotations

import pytest
import torch

from pp_offload import (
    GroupStateError,
    OffloadTensorGroup,
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


def test_a_group_is_closed_once() -> None:
    group = OffloadTensorGroup("mlp")
    group.move_to(GroupState.OFFLOADED)
    with pytest.raises(GroupStateError, match="'mlp' is offloaded and cannot become kept"):
        group.move_to(GroupState.KEPT)


def test_a_pushed_tensor_is_popped_by_its_tag_once() -> None:
    tag = (1, 2)
    group = OffloadTensorGroup("mlp")
    tensor, other = torch.ones(2), torch.zeros(2)
    group.push_tensor(tag, tensor)
    group.push_tensor("other", other)
    assert group.pop_tensor(tag) is tensor
    with pytest.raises(KeyError):
        group.pop_tensor(tag)
    assert group.pop_tensor("other") is other


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
