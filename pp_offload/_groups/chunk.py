"""One microbatch on one model chunk: its groups, from forward to backward.

Its collaborators come in the constructor, bundled as :class:`Wiring`; it asks no singleton.

    group = chunk.on_group_start_forward("mlp")  # tensors saved from here on belong to the group
    saved = chunk.tensor_push(tensor)            # pack hook
    chunk.on_group_commit_forward(None)          # copies are queued
    chunk.on_group_commit_backward("mlp")        # they are brought back
    tensor = chunk.tensor_pop(saved)             # unpack hook
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from pp_offload._common.checks import (
    check_count,
    check_group_name,
    check_kind,
    check_switch,
    checked_tensors,
)
from pp_offload._groups.group import GroupState, OffloadTensorGroup
from pp_offload._groups.plan import ChunkKey, ChunkShape, GroupKey, GroupShape
from pp_offload._groups.prefetch import Visit
from pp_offload._groups.wiring import Wiring
from pp_offload._memory.pool import GPUTensorPool
from pp_offload._transfer.payload import tickets_for
from pp_offload._transfer.saved_tensor import Packed, Resident, SavedActivation, SavedWrapper
from pp_offload._transfer.subclasses import is_wrapper
from pp_offload._transfer.ticket import Ticket
from pp_offload.errors import GroupStateError

logger = logging.getLogger(__name__)


PACKED = (SavedActivation, Resident, SavedWrapper)
"""What stands for a saved tensor."""


class ChunkOffloadHandler:
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
        self.min_offloaded_tensor_size = min_offloaded_tensor_size
        self.cpu_tensor_pool = cpu_tensor_pool
        self.vp_stage = vp_stage
        self.microbatch = microbatch
        self.key: ChunkKey | None = None
        self.groups: list[OffloadTensorGroup] = []
        self._open: list[OffloadTensorGroup] = []
        self._wiring = wiring or Wiring.alone()
        self.thread = threading.current_thread()

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
        if not self._wiring.eligibility.can_move(src_tensor):
            return Resident(src_tensor)
        group = OffloadTensorGroup("tensor")
        saved = SavedActivation(src_tensor, group)
        group.add(saved)
        self._move(group, self._tickets(group))
        return saved

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

        See :class:`pp_offload._transfer.tensors.Eligibility`.
        """
        return self._wiring.eligibility.admits(tensor, self.min_offloaded_tensor_size)

    def tensor_push(self, tensor: Tensor) -> Packed:
        """Save ``tensor`` in the group started last; what it returns is bound to that group.

        Outside any open group the tensor stays where it is.
        """
        if not self._open:
            return Resident(tensor)
        return self.pack(self._open[-1], tensor)

    def pack(self, group: OffloadTensorGroup, tensor: Tensor) -> Packed:
        """Save ``tensor`` in ``group``; of one made of others, the others."""
        wiring = self._wiring
        if group.state is not GroupState.OPEN or not wiring.is_enabled:
            return Resident(tensor)
        if wiring.eligibility.admits(tensor, self.min_offloaded_tensor_size):
            saved = SavedActivation(tensor, group, wiring.current_stream())
            group.add(saved)
            return saved
        if is_wrapper(tensor):
            wrapped = SavedWrapper(tensor, group.name, partial(self.pack, group))
            if not wrapped.is_resident:
                return wrapped
        return Resident(tensor)

    def tensor_pop(self, tensor_tag: Packed) -> Tensor:
        """The tensor behind a tag. The tag stays good: popping it twice is fine."""
        check_kind("tensor_tag", tensor_tag, PACKED, "what tensor_push() returned")
        return tensor_tag.unpack()

    # Forward

    def on_group_start_forward(self, name: str) -> OffloadTensorGroup:
        """Open a group.

        Raises:
            GroupStateError: The chunk belongs to another thread.
            TypeError: ``name`` is no ``str``.
            ValueError: It is empty.
        """
        check_group_name("start", name)
        if threading.get_ident() != self.thread.ident:
            raise self._other_thread("start", name)
        with self._wiring.lock:
            self._wiring.transfer.follow(self._wiring.current_stream())
            if self.key is None:
                self.key = self._wiring.number_chunk(self)
            group = self._new_group(name)
            self.groups.append(group)
            self._open.append(group)
        return group

    def _new_group(self, name: str) -> OffloadTensorGroup:
        key = None if self.key is None else GroupKey(self.key, len(self.groups))
        prefetcher = self._wiring.prefetcher
        on_use = None if prefetcher is None else prefetcher.on_use
        return OffloadTensorGroup(name, key=key, on_use=on_use)

    def on_group_commit_forward(self, forced_released_tensors: Sequence[Tensor] | None) -> None:
        """Close the group started last, and offload it if the plan says so."""
        released = checked_tensors("forced_released_tensors", forced_released_tensors)
        if not self._open:
            raise GroupStateError(
                "commit without an open group in this chunk; start one first, with "
                "FineGrainedActivationOffloadingInterface or fine_grained_offloading_group_start"
            )
        self.bulk_offload(released)

    def commit(
        self,
        name: str,
        forced_released_tensors: Sequence[Tensor] | None = None,
        *,
        delay: bool = False,
    ) -> OffloadTensorGroup:
        """Close the open group of this name, the innermost first, and offload it now or later.

        Args:
            name: What the group was started with.
            forced_released_tensors: Emptied after the copy, where nobody else needs them.
            delay: Only note the commit, for the manager's ``flush_delayed_groups``.

        Raises:
            GroupStateError: No open group has this name, or the chunk belongs to another thread.
            TypeError: ``name`` is no ``str``, or ``forced_released_tensors`` no list of tensors.
            ValueError: ``name`` is empty, or ``delay`` neither True nor False.
        """
        check_group_name("commit", name)
        check_switch("delay_offload", delay)
        released = checked_tensors("forced_released_tensors", forced_released_tensors)
        if threading.get_ident() != self.thread.ident:
            raise self._other_thread("commit", name)
        for group in reversed(self._open):
            if group.name == name:
                break
        else:
            raise self._not_open(name)
        if delay:
            self._open.remove(group)
            refs = [weakref.ref(tensor) for tensor in released or ()]
            self._wiring.delayed.append(partial(self._close_delayed, group, refs))
        elif group is self._open[-1]:
            self.on_group_commit_forward(released)
        else:
            self._open.remove(group)
            self._close(group, released)
        return group

    def _close(
        self, group: OffloadTensorGroup, forced_released_tensors: Sequence[Tensor] | None
    ) -> None:
        self._open.append(group)
        self.on_group_commit_forward(forced_released_tensors)

    def _close_delayed(
        self, group: OffloadTensorGroup, released: Sequence[weakref.ref[Tensor]]
    ) -> None:
        """A tensor that died meanwhile needs no release; waiting here keeps none alive."""
        self._close(group, [tensor for ref in released if (tensor := ref()) is not None])

    def _other_thread(self, action: str, name: str) -> GroupStateError:
        return GroupStateError(
            f"{action} of group '{name}' on thread {threading.get_ident()}, but its chunk belongs "
            f"to thread {self.thread.ident}; call init_chunk_handler on the thread that runs the "
            "forward"
        )

    def _not_open(self, name: str) -> GroupStateError:
        was_seen = any(group.name == name for group in self.groups)
        return GroupStateError(
            f"commit of group '{name}', but "
            + ("it was committed already" if was_seen else "no group of that name was started")
            + f" in this chunk; open groups: {[group.name for group in self._open]}; start and "
            "commit every group once"
        )

    def bulk_offload(self, forced_released_tensors: Sequence[Tensor] | None) -> None:
        """Offload the group being committed, or keep it; then release what the user named."""
        group = self._open[-1]
        if self.should_bulk_offload():
            self.bulk_offload_group()
        else:
            self._keep(self._open.pop())
        if forced_released_tensors and group.state is GroupState.OFFLOADED:
            wiring = self._wiring
            wiring.transfer.after_copies(wiring.release.of(forced_released_tensors))

    def should_bulk_offload(self) -> bool:
        """Whether the group being committed leaves the device.

        Not if offload is disabled, the plan keeps it, or its backward has begun or is about to: it
        is the last of its name in a chunk that certainly runs backward next.
        """
        wiring, group = self._wiring, self._open[-1]
        if not wiring.is_enabled or group.is_used:
            return False
        if group.key is None:
            return True
        if wiring.plan.keeps(group.key, group.name):
            return False
        if not wiring.plan.is_last_of_its_name(group.key, group.name):
            return True
        return next(wiring.queue.certain(), None) is not self

    def bulk_offload_group(self) -> None:
        """Queue the copies of the group being committed. With no room on the host it is kept."""
        group = self._open.pop()
        tickets = self._tickets(group)
        self._wiring.on_change()
        if self._wiring.prefetcher is not None:
            self._wiring.prefetcher.expect(group.total_offload_bytes)
        try:
            self._move(group, tickets)
        except MemoryError as failure:
            level = logging.DEBUG if self._wiring.has_warned else logging.WARNING
            self._wiring.has_warned = True
            logger.log(
                level,
                "group '%s' stays on the device, for its %d bytes find no room off it (%s); other "
                "groups may follow, without another warning",
                group.name,
                group.total_offload_bytes,
                failure,
            )
            group.move_to(GroupState.KEPT)

    # Backward

    def on_group_commit_backward(self, name: str) -> None:
        """Backward reaches the group of this name that runs first; bring its tensors.

        Raises:
            GroupStateError: The chunk's forward had no group of this name.
        """
        if self.find_group_with_name(name) is None:
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
        if self._wiring.prefetcher is not None:
            self._wiring.prefetcher.fill()

    def bulk_reload_group(self) -> None:
        """Reload the next group to run backward."""
        group = self.find_next_unused()
        if group is not None:
            group.on_use()

    def pre_reload_last_layer(self) -> None:
        """Reload the groups backward uses first, before it begins."""
        last = self.find_next_unused()
        if last is not None and self._wiring.prefetcher is not None:
            self._wiring.prefetcher.approach(last)

    # Questions

    def find_group_with_name(self, name: str, start_index: int = 0) -> OffloadTensorGroup | None:
        """The first group of this name at or after ``start_index`` in forward order."""
        return next((g for g in self.groups[start_index:] if g.name == name), None)

    def find_next_group(self, name: str | None = None) -> OffloadTensorGroup | None:
        """The first open group (of this name)."""
        return next((g for g in self._open if name in (None, g.name)), None)

    def find_next_unused(self) -> OffloadTensorGroup | None:
        """The group backward visits next."""
        return next((g for g in reversed(self.groups) if not g.is_used), None)

    def is_empty_chunk(self, name: str | None = None) -> bool:
        """Whether it has no group, or none of this name."""
        return not any(name in (None, group.name) for group in self.groups)

    @property
    def open_groups(self) -> Sequence[OffloadTensorGroup]:
        """Those started and not committed, first started first."""
        return self._open

    def visits(self) -> Iterator[Visit]:
        """Its groups, as backward comes by them."""
        return reversed(self.groups)

    @property
    def is_over(self) -> bool:
        """Whether nothing that its groups saved is alive."""
        return not any(group.is_alive for group in self.groups)

    @property
    def is_awaited(self) -> bool:
        """Whether it has a group that is open, or that saved what lives and is not reached yet."""
        if any(not group.has_failed for group in self._open):
            return True
        return any(not group.is_used and group.is_alive for group in self.groups)

    def finish_all_groups(self, name: str | None = None) -> bool:
        """Whether backward has reached every group (of this name) that saved something."""
        return all(
            group.is_used or group.total_tensor_count == 0
            for group in self.groups
            if name in (None, group.name)
        )

    def get_max_deduplicated_groups(self) -> int:
        """How many distinct names its groups have."""
        return len({group.name for group in self.groups})

    def shape(self) -> ChunkShape:
        """What the policy needs to know."""
        assert self.key is not None
        groups = (GroupShape(g.name, g.total_offload_bytes) for g in self.groups)
        return ChunkShape(self.key, tuple(groups))

    def reset(self) -> None:
        """Forget all groups. Tensors autograd still holds stay good."""
        for group in self.groups:
            if group.state is GroupState.OPEN:
                group.drop()
        self.groups.clear()
        self._open.clear()
        self.key = None  # a forward that goes on, on another thread, is part of the next step

    def _keep(self, group: OffloadTensorGroup) -> None:
        self._tickets(group)
        group.move_to(GroupState.KEPT)

    def _tickets(self, group: OffloadTensorGroup) -> list[Ticket]:
        saved = [one for one in group.saved() if one.may_leave]
        tickets = tickets_for(saved, self._wiring.mover, group.name)
        for ticket in tickets:
            group.total_offload_bytes += ticket.nbytes
        group.total_tensor_count += len(tickets)
        return tickets

    def _move(self, group: OffloadTensorGroup, tickets: list[Ticket]) -> None:
        transfer, copies = self._wiring.transfer, self._wiring.copies
        if self._wiring.verifier is not None:
            self._wiring.verifier.watch(tickets)
        # What a graph copies is there when it is launched, and not for others.
        is_capturing = transfer.backend.is_capturing
        with self._wiring.lock:
            new = tickets if is_capturing else copies.share(tickets)
        if new:
            group.copied_bytes += transfer.offload(new)  # which may wait, so the lock is not held
        with self._wiring.lock:
            if not is_capturing:
                copies.add(new)
            self._hand_over(group, tickets)

    def _hand_over(self, group: OffloadTensorGroup, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            ticket.hand_over()
        group.follow(tickets)
        if self._wiring.split is not None and group.key is not None:
            self._wiring.split.follow(group.key, tickets)
        group.move_to(GroupState.OFFLOADED)
