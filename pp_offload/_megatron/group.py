"""Megatron's group, for both generations: a group with tensors by tag, and two events."""

from __future__ import annotations

from torch import Tensor

from pp_offload._core.group import Group, GroupState
from pp_offload.backends import Event, Stream


class OffloadTensorGroup(Group):
    """Tensors saved between a start and its commit.

    A wait for an event that was not recorded does nothing.

    Source: Megatron-LM ``OffloadTensorGroup``.
    """

    # Class attributes until used: most groups need none, and a group is made during a forward.
    _tensors: dict[object, Tensor] | None = None
    _offload_event: Event | None = None
    _reload_event: Event | None = None
    duplicate_storage_tensor_count = 0
    duplicate_storage_bytes = 0

    def push_tensor(self, tag: object, tensor: Tensor) -> None:
        """Hold ``tensor`` under ``tag`` until it is popped or the group is committed."""
        if self._tensors is None:
            self._tensors = {}
        self._tensors[tag] = tensor

    def pop_tensor(self, tag: object) -> Tensor:
        """Take the tensor under ``tag``, which must be there, out of the group."""
        return (self._tensors or {}).pop(tag)

    def move_to(self, state: GroupState) -> None:
        """Close the group as offloaded or kept, and release the tensors by tag."""
        super().move_to(state)
        self._tensors = None

    def drop(self) -> None:
        """Forget all tensors of an open group, such as when a step is aborted."""
        super().drop()
        self._tensors = None

    def record_offload_event(self, stream: Stream) -> None:
        """Note that the copies to the host are done at this point of ``stream``."""
        self._offload_event = stream.record_event()

    def wait_offload_event(self, stream: Stream) -> None:
        """Make ``stream`` wait for the copies to the host."""
        if self._offload_event is not None:
            stream.wait_event(self._offload_event)

    def record_reload_event(self, stream: Stream) -> None:
        """Note that the tensors are back at this point of ``stream``."""
        self._reload_event = stream.record_event()

    def wait_reload_event(self, stream: Stream) -> None:
        """Make ``stream`` wait for the tensors to be back."""
        if self._reload_event is not None:
            stream.wait_event(self._reload_event)

    def update_offload_info(self, tensor: Tensor) -> None:
        """Count ``tensor`` among what offloading this group moves."""
        self.counts.num_tensors += 1
        self.counts.nbytes += tensor.nbytes

    def set_duplicate_storage_info(self, tensor_count: int, duplicate_bytes: int) -> None:
        """Note repeated copies of the same bytes, which the engine itself never makes."""
        self.duplicate_storage_tensor_count = tensor_count
        self.duplicate_storage_bytes = duplicate_bytes

    @property
    def total_tensor_count(self) -> int:
        """Number of payloads that may leave."""
        return self.counts.num_tensors

    @property
    def total_offload_bytes(self) -> int:
        """Bytes of the payloads that may leave."""
        return self.counts.nbytes
