"""The reference's chunk: what the engine does with a group in one call, in the reference's steps.

group = chunk.on_group_start_forward("mlp")  # tensors saved from here on belong to the group
tag = chunk.tensor_push(tensor)              # pack hook
chunk.on_group_commit_forward(None)          # copies are queued
chunk.on_group_commit_backward("mlp")        # they are brought back
tensor = chunk.tensor_pop(tag)               # unpack hook
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from pp_offload._common.checks import check_count, check_kind, checked_tensors
from pp_offload._groups.chunk import Chunk
from pp_offload._groups.group import Group
from pp_offload._groups.wiring import Wiring
from pp_offload._megatron.group import OffloadTensorGroup
from pp_offload._memory.pool import GPUTensorPool
from pp_offload._transfer.saved_tensor import Packed, Resident, SavedWrapper
from pp_offload._transfer.ticket import SavedActivation, give_back
from pp_offload.errors import GroupStateError

PACKED = (SavedActivation, Resident, SavedWrapper)
"""What stands for a saved tensor."""


class ChunkOffloadHandler(Chunk):
    """Offloads and reloads the groups of one chunk.

    Args:
        min_offloaded_tensor_size: Smaller tensors stay on the device. In elements.
        cpu_tensor_pool: Kept for callers that manage host tensors themselves; the engine's own
            host memory is its host tier.
        wiring: What it shares with other chunks; its own when not given.
        vp_stage: Virtual pipeline stage it runs.
        microbatch: Its number in the step; counted when None.

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
        wiring: Wiring | None = None,
        vp_stage: int = 0,
        microbatch: int | None = None,
    ) -> None:
        check_count("min_offloaded_tensor_size", min_offloaded_tensor_size)
        check_count("vp_stage", vp_stage)
        super().__init__(
            min_offloaded_tensor_size,
            wiring or Wiring.alone(),
            vp_stage=vp_stage,
            microbatch=microbatch,
        )
        self.cpu_tensor_pool = cpu_tensor_pool

    # Single tensors

    def offload(
        self, src_tensor: Tensor, pin_memory: bool = True, use_cpu_pool: bool = True
    ) -> SavedActivation | Resident:
        """Copy one tensor to the host.

        Args:
            src_tensor: Any tensor; one that is no dense memory on the device stays where it is.
            pin_memory: Accepted for the reference; the backend knows what its copies need.
            use_cpu_pool: Accepted for the reference; host memory is always reused.

        Returns:
            An opaque state for :meth:`reload`; the host bytes live as long as it does.
        """
        check_kind("src_tensor", src_tensor, Tensor, "a tensor")
        if not self.wiring.eligibility.can_move(src_tensor):
            return Resident(src_tensor)
        return self.wiring.offload_alone(OffloadTensorGroup, src_tensor)

    def reload(self, state: SavedActivation | Resident, non_blocking: bool | None = None) -> Tensor:
        """The tensor :meth:`offload` took, on the device, ready for the current stream.

        Args:
            state: What :meth:`offload` returned. May be reloaded any number of times.
            non_blocking: Accepted for the reference; the host never blocks on an accelerator.
        """
        check_kind("state", state, PACKED, "what offload() returned")
        return state.unpack()

    # Autograd's hooks

    def tensor_need_offloading_checker(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` may be offloaded.

        See :class:`pp_offload._core.tensors.Eligibility`.
        """
        return self.wiring.eligibility.admits(tensor, self.min_offloaded_tensor_size)

    def tensor_push(self, tensor: Tensor) -> Packed:
        """Save ``tensor`` in the group started last; what it returns is bound to that group.

        Outside any open group the tensor stays where it is.
        """
        if not self.open_groups:
            return Resident(tensor)
        return self.pack(self.open_groups[-1], tensor)

    def tensor_pop(self, tensor_tag: Packed) -> Tensor:
        """The tensor behind a tag. The tag stays good: popping it twice is fine."""
        check_kind("tensor_tag", tensor_tag, PACKED, "what tensor_push() returned")
        return tensor_tag.unpack()

    # Forward

    def on_group_start_forward(self, name: str) -> OffloadTensorGroup:
        """Open a group; see :meth:`start`."""
        return cast(OffloadTensorGroup, self.start(name))

    def on_group_commit_forward(self, forced_released_tensors: Sequence[Tensor] | None) -> None:
        """Close the group started last, and offload it if the plan says so."""
        released = checked_tensors("forced_released_tensors", forced_released_tensors)
        self.bulk_offload(released)

    def bulk_offload(self, forced_released_tensors: Sequence[Tensor] | None) -> None:
        """Offload the group started last, or keep it; then release what the user named."""
        group = self._last_open()
        self.open_groups.pop()
        self.close(group, forced_released_tensors)

    def should_bulk_offload(self) -> bool:
        """Whether the group started last would leave the device if it was committed now."""
        return self.would_leave(self._last_open())

    def would_leave(self, group: Group) -> bool:
        """Whether an open group would leave the device if it was committed now."""
        give_back(self.wiring.offloader.tickets(group))  # which are counted
        return self.may_leave(group)

    def bulk_offload_group(self) -> None:
        """Queue the copies of the group started last. With no room on the host it is kept."""
        group = self._last_open()
        self.open_groups.pop()
        self.send(group)

    def _last_open(self) -> Group:
        if not self.open_groups:
            raise GroupStateError(
                "commit without an open group in this chunk; start one first, with "
                "FineGrainedActivationOffloadingInterface or fine_grained_offloading_group_start"
            )
        return self.open_groups[-1]

    # Backward

    def on_group_commit_backward(self, name: str) -> None:
        """Backward reaches the next group of this name: bring its tensors.

        Raises:
            GroupStateError: The chunk's forward had no group of this name.
        """
        if self.is_empty_chunk(name):
            raise GroupStateError(
                f"backward of group '{name}', but this chunk's forward had none of that name; its "
                f"groups: {[group.name for group in self.groups]}; run the forward first"
            )
        for group in reversed(self.groups):
            if group.name == name and not group.is_used:
                group.on_use()
                return

    def on_group_start_backward(self) -> None:
        """Backward leaves a group; reload what comes next."""
        self.bulk_reload()

    def bulk_reload(self) -> None:
        """Reload ahead as far as the window allows."""
        self.wiring.prefetcher.fill()

    def bulk_reload_group(self) -> None:
        """Reload the next group to run backward."""
        group = self.find_next_unused()
        if group is not None:
            group.on_use()

    def pre_reload_last_layer(self) -> None:
        """Reload the groups backward uses first, before it begins."""
        last = self.find_next_unused()
        if last is not None:
            self.wiring.prefetcher.approach(last)

    # Questions

    def find_group_with_name(self, name: str, start_index: int = 0) -> OffloadTensorGroup | None:
        """The first group of this name at or after ``start_index`` in forward order."""
        return next((g for g in self.groups[start_index:] if g.name == name), None)

    def find_next_group(self, name: str | None = None) -> OffloadTensorGroup | None:
        """The first open group (of this name)."""
        return next((g for g in self.open_groups if name in (None, g.name)), None)

    def find_next_unused(self) -> OffloadTensorGroup | None:
        """The group backward visits next."""
        return next((g for g in reversed(self.groups) if not g.is_used), None)

    def finish_all_groups(self, name: str | None = None) -> bool:
        """Whether backward has reached every group (of this name) that saved something."""
        return self.is_finished(name)

    def get_max_deduplicated_groups(self) -> int:
        """How many distinct names its groups have."""
        return len({group.name for group in self.groups})
