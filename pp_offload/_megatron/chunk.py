"""Megatron's chunk: the engine's single calls, in Megatron's steps.

    group = chunk.on_group_start_forward("mlp")  # tensors saved from here on belong to the group
    tag = chunk.tensor_push(tensor)              # pack hook
    chunk.on_group_commit_forward(None)          # copies are queued
    chunk.on_group_commit_backward("mlp")        # tensors are reloaded
    tensor = chunk.tensor_pop(tag)               # unpack hook

The chunk of Megatron-LM's main commits groups by name, and counts copies in flight. Both have
groups with tensors by tag and two events.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pp_offload._common.checks import check_count
from pp_offload._core.group import Group, GroupState
from pp_offload._core.saved import Packed, Resident, Saved
from pp_offload._groups.chunk import Chunk
from pp_offload._groups.offloader import Offloader
from pp_offload._memory.pool import GPUTensorPool
from pp_offload.backends import Event, Stream, default_backend
from pp_offload.config import OffloadConfig
from pp_offload.errors import GroupStateError


class OffloadTensorGroup(Group):
    """Tensors saved between a start and its commit.

    A wait for an event that was not recorded does nothing.

    Source: Megatron-LM ``OffloadTensorGroup``.
    """

    # Class attributes until used: most groups need none, and a group is made during a forward.
    _tensors: dict[object, Tensor] | None = None
    _offload_event: Event | None = None
    _reload_event: Event | None = None

    def push_tensor(self, tag: object, tensor: Tensor) -> None:
        """Hold ``tensor`` under ``tag`` until it is popped or the group is committed."""
        self._tensors = self._tensors or {}
        self._tensors[tag] = tensor

    def pop_tensor(self, tag: object) -> Tensor:
        """Take the tensor under ``tag``, which must be there, out of the group."""
        return (self._tensors or {}).pop(tag)

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
        """Do nothing: the engine copies bytes once."""


class ChunkOffloadHandler(Chunk):
    """Offloads and reloads the groups of one chunk.

    Args:
        min_offloaded_tensor_size: Smaller tensors stay on the device. In elements.
        cpu_tensor_pool: Pool for callers that manage host tensors themselves, unlike the engine.
        offloader: State shared with other chunks; the chunk's own when not given.
        vp_stage: Virtual pipeline stage of the chunk.
        microbatch: Number of the chunk in the step; counted when None.

    Source: Megatron-LM ``ChunkOffloadHandler``.
    """

    group_type = OffloadTensorGroup
    groups: list[OffloadTensorGroup]  # type: ignore[assignment]
    open_groups: list[OffloadTensorGroup]  # type: ignore[assignment]

    def __init__(
        self,
        min_offloaded_tensor_size: int,
        cpu_tensor_pool: GPUTensorPool | None,
        *,
        offloader: Offloader | None = None,
        vp_stage: int = 0,
        microbatch: int | None = None,
    ) -> None:
        offloader = offloader or Offloader(default_backend(), OffloadConfig())
        smallest = min_offloaded_tensor_size
        super().__init__(smallest, offloader, vp_stage=vp_stage, microbatch=microbatch)
        self.cpu_tensor_pool = cpu_tensor_pool

    # Single tensors

    def offload(
        self, src_tensor: Tensor, pin_memory: bool = True, use_cpu_pool: bool = True
    ) -> Saved | Resident:
        """Copy one tensor to the host. A tensor stays that may not leave as a saved one.

        Args:
            src_tensor: Any tensor.
            pin_memory, use_cpu_pool: Accepted for Megatron; the backend knows what its copies need,
                and host memory is always reused.

        Returns:
            An opaque state for :meth:`reload`; the host bytes live as long as the state.
        """
        if not self.offloader.engine.eligibility.admits(src_tensor, 1):
            return Resident(src_tensor)
        return self.offloader.engine.offload(src_tensor)

    def reload(self, state: Saved | Resident, non_blocking: bool | None = None) -> Tensor:
        """Return the tensor of :meth:`offload` on the device, ready for the current stream.

        Args:
            state: Result of :meth:`offload`. May be reloaded any number of times.
            non_blocking: Accepted for Megatron; the host never blocks on an accelerator.
        """
        return state.unpack()

    # Autograd's hooks

    def tensor_need_offloading_checker(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` may be offloaded."""
        return self.offloader.engine.eligibility.admits(tensor, self.min_offloaded_tensor_size)

    def tensor_push(self, tensor: Tensor) -> Packed:
        """Save ``tensor`` in the group started last; outside any open group the tensor stays."""
        return self.open_groups[-1].pack(tensor) if self.open_groups else Resident(tensor)

    def tensor_pop(self, tensor_tag: Packed) -> Tensor:
        """Return the tensor behind a tag. The tag stays valid: popping it twice is allowed."""
        return tensor_tag.unpack()

    # Forward

    on_group_start_forward = Chunk.start  # Megatron's name

    def on_group_commit_forward(self, forced_released_tensors: Sequence[Tensor] | None) -> None:
        """Commit the group started last; see :meth:`commit`."""
        self.commit(self._last_open().name, forced_released_tensors)

    bulk_offload = on_group_commit_forward

    def should_bulk_offload(self) -> bool:
        """Whether the group started last would leave the device if committed now."""
        return self._would_leave(self._last_open())

    def _would_leave(self, group: Group) -> bool:
        self.offloader.engine.payloads(group)  # counts the payloads
        return self.may_leave(group)

    def bulk_offload_group(self) -> None:
        """Offload the group started last, ignoring the plan; without host room it stays."""
        group = self._last_open()
        self.open_groups.remove(group)
        self.send(group)

    def _last_open(self) -> OffloadTensorGroup:
        if not self.open_groups:
            raise GroupStateError(
                "commit without an open group in this chunk; start one first, with "
                "FineGrainedActivationOffloadingInterface or fine_grained_offloading_group_start"
            )
        return self.open_groups[-1]

    # Backward

    def on_group_commit_backward(self, name: str | None) -> None:
        """Mark the next group of this name, if any, as reached; reload its tensors."""
        if (group := self._next_in_backward(name)) is not None:
            group.on_use()

    def bulk_reload(self) -> None:
        """Reload ahead as far as the window allows."""
        engine = self.offloader.engine
        engine.guarded(engine.window.fill)

    on_group_start_backward = bulk_reload

    def bulk_reload_group(self) -> None:
        """Reload the next group to run backward."""
        self.on_group_commit_backward(None)

    def pre_reload_last_layer(self) -> None:
        """Reload the groups backward uses first, before it begins."""
        if (group := self._next_in_backward(None)) is not None:
            self.offloader.resume(group)

    def _next_in_backward(self, name: str | None) -> Group | None:
        unused = (group for group in reversed(self.groups) if not group.is_used)
        return next((group for group in unused if name in (None, group.name)), None)

    # Questions

    def find_group_with_name(self, name: str, start_index: int = 0) -> OffloadTensorGroup | None:
        """Return the first group of this name at or after ``start_index`` in forward order."""
        return next((g for g in self.groups[start_index:] if g.name == name), None)

    def find_next_group(self, name: str | None = None) -> OffloadTensorGroup | None:
        """Return the first open group (of this name)."""
        return next((g for g in self.open_groups if name in (None, g.name)), None)

    finish_all_groups = Chunk.is_finished  # Megatron's name

    def get_max_deduplicated_groups(self) -> int:
        """Return the number of distinct names of the chunk's groups."""
        return len({group.name for group in self.groups})


# Megatron-LM's main


class MainChunkOffloadHandler(ChunkOffloadHandler):
    """Offloads and reloads the groups of one chunk.

    Args:
        min_offloaded_tensor_size, cpu_tensor_pool, offloader, vp_stage, microbatch: As in the class
            of this name that it extends.
        max_inflight_offloads: Number of groups of one name of this microbatch that may be in flight
            to the host before compute waits for the oldest. With 0, compute waits for each; with
            None, only for ``OffloadConfig(max_in_flight_bytes=...)``, which always holds.

    Source: Megatron-LM ``ChunkOffloadHandler``.
    """

    _delays_in_replay_only = True

    def __init__(
        self,
        min_offloaded_tensor_size: int,
        cpu_tensor_pool: GPUTensorPool | None,
        max_inflight_offloads: int | None = None,
        *,
        offloader: Offloader | None = None,
        vp_stage: int = 0,
        microbatch: int | None = None,
    ) -> None:
        if max_inflight_offloads is not None:
            expected = "offloads of a name; None for no limit"
            check_count("max_inflight_offloads", max_inflight_offloads, unit=expected)
        smallest = min_offloaded_tensor_size
        super().__init__(
            smallest, cpu_tensor_pool, offloader=offloader, vp_stage=vp_stage, microbatch=microbatch
        )
        self.offload_groups = self.groups  # main's name
        self.max_inflight_offloads = max_inflight_offloads
        self._in_flight: dict[str, deque[Any]] = defaultdict(deque)

    def close(self, group: Group, released: Sequence[Tensor] | None) -> None:
        """See :meth:`Chunk.close`; then compute waits until few enough groups are in flight."""
        super().close(group, released)
        most, mover = self.max_inflight_offloads, self.offloader.engine.mover
        if group.state is not GroupState.OFFLOADED or most is None:
            return
        with mover.lock:  # a backward on another thread removes finished copies
            queue = mover.in_flight.queue
            last = queue[-1].offloaded if queue else None
        if last is None:
            return
        in_flight = self._in_flight[group.name]
        in_flight.append(last)
        while len(in_flight) > most:
            self.offloader.engine.guarded(mover.wait_up_to, in_flight.popleft())

    def on_group_commit_forward(  # type: ignore[override]
        self, name: str, forced_released_tensors: Sequence[Tensor] | None
    ) -> None:
        """See :meth:`commit`."""
        self.commit(name, forced_released_tensors)

    bulk_offload = on_group_commit_forward  # type: ignore[assignment]

    def should_bulk_offload(self, group: Group) -> bool:  # type: ignore[override]
        """Whether an open group would leave the device if committed now."""
        return self._would_leave(group)

    def bulk_offload_group(  # type: ignore[override]
        self, group_to_offload: OffloadTensorGroup
    ) -> None:
        """Offload an open group, ignoring the plan; without host room the group stays."""
        self.open_groups.remove(group_to_offload)
        self.send(group_to_offload)

    def find_group_with_name(  # type: ignore[override]
        self, groups: Sequence[OffloadTensorGroup], name: str, start_index: int = 0
    ) -> OffloadTensorGroup | None:
        """Return the first of ``groups`` with this name, at or after ``start_index``."""
        return next((group for group in groups[start_index:] if group.name == name), None)

    def reset(self) -> None:
        """See :meth:`Chunk.reset`."""
        super().reset()
        self._in_flight.clear()
