"""Chunk and group as Megatron-LM's main has them: a group by its name, and a count in flight.

    chunk.on_group_start_forward("mlp")
    chunk.on_group_commit_forward("mlp", [residual])

Main commits by name, for several groups may be open, where the module as it was introduced closed
the one started last.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from torch import Tensor

from pp_offload._common.checks import check_count, check_kind
from pp_offload._groups.group import Group, GroupState
from pp_offload._groups.wiring import Wiring
from pp_offload._megatron import chunk as introduced
from pp_offload._megatron import group as introduced_group
from pp_offload._megatron.flags import is_flagged
from pp_offload._memory.pool import GPUTensorPool
from pp_offload._transfer.in_flight import PendingOffload
from pp_offload._transfer.saved_tensor import Packed, Resident
from pp_offload.errors import GroupStateError


class OffloadTensorGroup(introduced_group.OffloadTensorGroup):
    """Tensors saved between a start and its commit.

    Source: Megatron-LM ``OffloadTensorGroup``.
    """

    duplicate_storage_tensor_count = 0
    duplicate_storage_bytes = 0

    def set_duplicate_storage_info(self, tensor_count: int, duplicate_bytes: int) -> None:
        """Note copies of bytes that the group had copied before. The engine makes none itself.

        Args:
            tensor_count: How many.
            duplicate_bytes: Their bytes.
        """
        check_count("tensor_count", tensor_count)
        check_count("duplicate_bytes", duplicate_bytes, unit="bytes")
        self.duplicate_storage_tensor_count = tensor_count
        self.duplicate_storage_bytes = duplicate_bytes


class ChunkOffloadHandler(introduced.ChunkOffloadHandler):
    """Offloads and reloads the groups of one chunk.

    Args:
        min_offloaded_tensor_size: Smaller tensors stay on the device. In elements.
        cpu_tensor_pool: Kept for callers that manage host tensors themselves.
        max_inflight_offloads: See :attr:`max_inflight_offloads`.
        wiring: What it shares with other chunks; its own when not given.
        vp_stage: Virtual pipeline stage it runs.
        microbatch: Its number in the step; counted when None.

    Attributes:
        max_inflight_offloads: Of this microbatch's groups of one name, how many may be on their
            way to the host without compute having waited for them. 0: compute waits for each.
            None: only ``OffloadConfig(max_in_flight_bytes=...)`` counts, as it does beside any
            number. Groups of other microbatches are counted on their own.

    Source: Megatron-LM ``ChunkOffloadHandler``.
    """

    group_type = OffloadTensorGroup

    def __init__(
        self,
        min_offloaded_tensor_size: int,
        cpu_tensor_pool: GPUTensorPool | None,
        max_inflight_offloads: int | None = None,
        *,
        wiring: Wiring | None = None,
        vp_stage: int = 0,
        microbatch: int | None = None,
    ) -> None:
        check_most_in_flight(max_inflight_offloads)
        super().__init__(
            min_offloaded_tensor_size,
            cpu_tensor_pool,
            wiring=wiring,
            vp_stage=vp_stage,
            microbatch=microbatch,
        )
        self.max_inflight_offloads = max_inflight_offloads
        self._on_their_way: dict[str, deque[PendingOffload]] = defaultdict(deque)

    # What is saved

    def pack(self, group: Group, tensor: Tensor) -> Packed:
        """Save ``tensor`` in ``group``; one that is flagged stays, and so does its storage."""
        if is_flagged(tensor):
            self.wiring.eligibility.kept.add(tensor)
            return Resident(tensor)
        return super().pack(group, tensor)

    def tensor_need_offloading_checker(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` may be offloaded: it is not flagged, and what else is needed."""
        return not is_flagged(tensor) and super().tensor_need_offloading_checker(tensor)

    # Forward

    def close(self, group: Group, released: Sequence[Tensor] | None) -> None:
        """Offload a group that is open no more, or keep it; compute may wait for earlier ones."""
        for tensor in released or ():
            if is_flagged(tensor):
                self.wiring.eligibility.kept.add(tensor)
        super().close(group, released)
        if group.state is GroupState.OFFLOADED:
            self._limit(group.name)

    def _limit(self, name: str) -> None:
        """Wait for groups of this name while there are too many, the one sent last among them."""
        most, in_flight = self.max_inflight_offloads, self.wiring.transfer.copies.in_flight
        if most is None:
            return
        with self.wiring.lock:  # a backward of another thread takes out what has ended
            last = in_flight.queue[-1] if in_flight.queue else None
        if last is None:
            return
        on_their_way = self._on_their_way[name]
        on_their_way.append(last)
        while len(on_their_way) > most:
            self.wiring.transfer.wait_up_to(on_their_way.popleft())

    def on_group_commit_forward(  # type: ignore[override]
        self, name: str, forced_released_tensors: Sequence[Tensor] | None
    ) -> None:
        """Close the open group of this name, the innermost first; see :meth:`commit`."""
        self.commit(name, forced_released_tensors)

    def bulk_offload(  # type: ignore[override]
        self, name: str, forced_released_tensors: Sequence[Tensor] | None
    ) -> None:
        """Offload the open group of this name, or keep it; then release what the user named."""
        self.commit(name, forced_released_tensors)

    def should_bulk_offload(self, group: Group) -> bool:  # type: ignore[override]
        """Whether an open group would leave the device if it was committed now."""
        return self.would_leave(self._open(group))

    def bulk_offload_group(self, group_to_offload: Group) -> None:  # type: ignore[override]
        """Queue the copies of an open group. With no room on the host it is kept."""
        self.open_groups.remove(self._open(group_to_offload))  # type: ignore[arg-type]
        self.send(group_to_offload)

    def _open(self, group: object) -> Group:
        check_kind("group", group, Group, "a group of this chunk")
        assert isinstance(group, Group)
        if not any(one is group for one in self.open_groups):
            raise GroupStateError(
                f"group '{group.name}' is not open in this chunk; its open groups are "
                f"{[one.name for one in self.open_groups]}; give one that on_group_start_forward "
                "returned and nobody has committed"
            )
        return group

    # Questions

    @property
    def offload_groups(self) -> list[introduced_group.OffloadTensorGroup]:
        """Its groups in forward order, those of this step alone."""
        return self.groups

    @property
    def do_offload(self) -> bool:
        """Whether offload is enabled."""
        return self.wiring.is_enabled

    def find_group_with_name(  # type: ignore[override]
        self,
        groups: Sequence[introduced_group.OffloadTensorGroup],
        name: str,
        start_index: int = 0,
    ) -> introduced_group.OffloadTensorGroup | None:
        """The first of ``groups`` with this name, at or after ``start_index``."""
        return next((group for group in groups[start_index:] if group.name == name), None)

    def reset(self) -> None:
        """Forget all groups, and what is on its way. Tensors autograd still holds stay good."""
        super().reset()
        self._on_their_way.clear()


def check_most_in_flight(value: object) -> None:
    """Check a number of offloads, or None.

    Raises:
        ValueError: It is neither.
    """
    if value is not None:
        check_count("max_inflight_offloads", value, unit="offloads of a name; None for no limit")
