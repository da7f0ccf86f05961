"""One microbatch on one model chunk: its groups, from forward to backward.

    group = chunk.start("mlp")          # tensors saved from here on belong to the group
    packed = group.pack(tensor)         # pack hook
    chunk.commit("mlp")                 # copies are queued
    packed.unpack()                     # unpack hook; backward has reached the group

NOTE [ Recorded operators ]
    A group that is committed inside one of these three stays on the device. In ``make_fx`` copies
    would become part of the graph, with host buffers as constants whose bytes differ when the graph
    runs. In ``torch.jit.trace`` sizes are tensors, not numbers. In the transforms of ``torch.func``
    memory that the engine allocates would be a wrapper without storage.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

from torch import Tensor

from pp_offload._common.checks import check_group_name, checked_tensors
from pp_offload._common.torch_private import is_transformed, records_operators
from pp_offload._core.group import ChunkKey, Group, GroupKey, GroupState
from pp_offload._core.payloads import Payloads
from pp_offload._groups.offloader import Offloader
from pp_offload._groups.plan import ChunkRecord, ChunkShape, GroupBytes, groups_sum
from pp_offload._hooks import is_in_region, warn_of_region
from pp_offload.errors import GroupStateError


class Chunk:
    """Offloads the groups of one chunk."""

    group_type: ClassVar[type[Group]] = Group
    _delays_in_replay_only: ClassVar[bool] = False  # True for the chunks of Megatron's main

    def __init__(
        self,
        min_offloaded_tensor_size: int,  # in elements; smaller tensors stay
        offloader: Offloader,
        *,
        vp_stage: int = 0,
        microbatch: int | None = None,  # counted when None
    ) -> None:
        self.min_offloaded_tensor_size = min_offloaded_tensor_size
        self.offloader = offloader
        self.vp_stage, self.microbatch = vp_stage, microbatch
        self.key: ChunkKey | None = None  # in the step, if any; set when the first group starts
        self.groups: list[Group] = []  # in forward order
        # Started and not committed, first started first, and what leaves_out() closed already.
        self.open_groups: list[Group] = []
        self.thread = threading.current_thread()  # runs the forward
        self.is_left = False  # whether that thread has begun another chunk
        # A later forward may save tensors that this stream computes now.
        offloader.engine.follow(offloader.engine.current_stream())

    # Forward

    def start(self, name: str) -> Group:
        """Open a group.

        Raises:
            TypeError: ``name`` is no ``str``.
            ValueError: ``name`` is empty.
        """
        if type(name) is not str or not name:  # checked here to spare a call for each group
            check_group_name("start", name)
        offloader, engine = self.offloader, self.offloader.engine
        with engine.mover.lock:
            engine.follow(engine.current_stream())
            if self.key is None:
                offloader.step.add(self, offloader.split)  # sets the key, but for a lone chunk
            group = self.group_type(name, engine=engine, min_numel=self.min_offloaded_tensor_size)
            if self.key is not None:
                group.key = GroupKey(self.key, len(self.groups))
            self.groups.append(group)
            self.open_groups.append(group)
            for tell in engine.observers.opened:
                tell(group)
        return group

    def commit(
        self,
        name: str,
        forced_released_tensors: Sequence[Tensor] | None = None,
        *,
        delay: bool = False,
    ) -> Group:
        """Close the open group of this name, the innermost first, and offload it now or later.

        Args:
            name: Name that the group was started with.
            forced_released_tensors: Tensors to empty after the copy, unless something uses them.
            delay: Only note the commit, for :meth:`Offloader.commit_delayed`.

        Raises:
            GroupStateError: No open group has this name.
            TypeError: ``name`` is no ``str``, or ``forced_released_tensors`` no list of tensors.
            ValueError: ``name`` is empty.
        """
        if type(name) is not str or not name:
            check_group_name("commit", name)
        released = None  # nearly always
        if forced_released_tensors is not None:
            released = checked_tensors("forced_released_tensors", forced_released_tensors)
        if self.open_groups and self.open_groups[-1].name == name:  # nearly always
            group = self.open_groups.pop()
        else:
            group = self._outer(name)
            self.open_groups.remove(group)
        if group.state is not GroupState.OPEN:
            return group  # the group was left out
        if delay and (not self._delays_in_replay_only or self.offloader.step.is_in_replay):
            self.offloader.delay(partial(self.close, group), released)
        else:
            self.close(group, released)
        return group

    def is_idle(self, name: str) -> bool:
        """Whether a group does nothing now: in a checkpoint, or while offload is disabled."""
        if is_in_region():
            warn_of_region(f"group '{name}'")
            return True
        return not self.offloader.engine.is_enabled

    def leaves_out(self, name: str) -> bool:
        """If a group that starts now does nothing, return True, and add a closed one to commit."""
        if not self.is_idle(name):
            return False
        group = self.group_type(name)
        group.state = GroupState.KEPT
        self.open_groups.append(group)
        return True

    def close(self, group: Group, released: Sequence[Tensor] | None) -> None:
        """Offload or keep a group just taken from the open ones; then release the named tensors."""
        if is_transformed() or records_operators():  # see NOTE [ Recorded operators ]
            self.offloader.engine.keep(group)
        else:
            self._offload(group)  # a call, so that no local variable here holds released tensors
        if released and group.state is GroupState.OFFLOADED:
            self.offloader.release_after_copies(released)

    def _offload(self, group: Group) -> None:
        payloads = self.offloader.engine.payloads(group)
        chosen, engine = payloads.chosen, self.offloader.engine
        place = group.key and group.key.place
        is_lean = place in self.offloader.plan.lean and not group.is_used and engine.is_enabled
        # If kept, tensors whose recipes need offloaded bytes would stay whole, without room.
        may_leave = self.may_leave(group) or (is_lean and chosen and chosen.reached)
        if may_leave and (payloads.tensors or (chosen and chosen.recipes)):
            self.send(group, payloads)
        else:
            engine.keep(group, payloads, is_lean=is_lean)

    def may_leave(self, group: Group) -> bool:
        """Whether a group being committed leaves the device, once its bytes are counted. It stays
        if offload is disabled, the plan keeps it, or its backward has begun or is next: it is the
        last of its name in a chunk that certainly runs backward next. But a group that does not
        fit below a limit leaves.
        """
        offloader, key = self.offloader, group.key
        if not offloader.engine.is_enabled or group.is_used:
            return False
        if key is None:
            return True
        plan, nbytes = offloader.plan, group.counts.nbytes
        stays = plan.keeps(key, group.name, nbytes) or (
            plan.is_last_of_its_name(key, group.name)
            and next(offloader.step.queue.certain(), None) is self
        )
        return not stays or nbytes > plan.stay.get(key.place, nbytes)

    def send(self, group: Group, payloads: Payloads | None = None) -> None:
        """Queue the copies of a group being committed. Without room on the host the group stays."""
        engine, split = self.offloader.engine, self.offloader.split
        engine.send(group, payloads or engine.payloads(group))
        if split is not None:
            with self.offloader.lock:
                split.follow(group)

    def _outer(self, name: str) -> Group:
        """Return the innermost open group of this name, if the innermost of all has another."""
        for group in reversed(self.open_groups):
            if group.name == name:
                return group
        was_seen = any(group.name == name for group in self.groups)
        raise GroupStateError(
            f"commit of group '{name}', but "
            + ("it was committed already" if was_seen else "no group of that name was started")
            + f" in this chunk; open groups: {[group.name for group in self.open_groups]}; start "
            "and commit every group once, and both where grad is enabled"
        )

    # Questions

    def uncommitted(self) -> list[Group]:
        """Return the groups that still wait for their commit to keep or offload them."""
        return [group for group in self.open_groups if group.state is GroupState.OPEN]

    def is_empty_chunk(self, name: str | None = None) -> bool:
        """Whether the chunk has no group (of this name)."""
        return not any(name in (None, group.name) for group in self.groups)

    def visits(self) -> Iterator[Group]:
        """Return the groups in the order in which backward visits them."""
        return reversed(self.groups)

    @property
    def is_over(self) -> bool:
        """Whether no tensor that the chunk's groups saved is alive."""
        return not any(group.is_alive for group in self.groups)

    @property
    def is_awaited(self) -> bool:
        """Whether a group is open, or backward has yet to reach living tensors that may leave."""
        is_open = any(not (group.has_failed or group.is_used) for group in self.uncommitted())
        is_running = is_open and not self.is_left
        groups = [group for group in self.groups if group.state is not GroupState.KEPT]
        return is_running or any(not group.is_used and group.is_alive for group in groups)

    def is_finished(self, name: str | None = None, *, is_ended: bool = False) -> bool:
        """Whether backward has reached the first group (of this name) that saved something, and,
        unless the step ``is_ended``, needs no other. A loss may leave out groups, such as the last.
        """
        groups = [group for group in self.groups if name in (None, group.name)]
        first = next((group for group in groups if group.counts.num_tensors), None)
        if first is not None and not first.is_used:
            return False
        return is_ended or not any([group.is_alive for group in groups if not group.is_used])

    def record(self, key: ChunkKey) -> ChunkRecord:
        """Return the record of the chunk as chunk ``key`` of the step."""
        group_bytes: dict[str, list[GroupBytes]] = {}
        num_tensors, num_committed = Counter[str](), Counter[str]()
        for group in self.groups:
            nbytes = GroupBytes.of(group.counts, stays=group.state is GroupState.KEPT)
            group_bytes.setdefault(group.name, []).append(nbytes)
            num_tensors[group.name] += group.counts.num_tensors
            num_committed[group.name] += group.state is not GroupState.OPEN
        sums = {name: groups_sum(each) for name, each in group_bytes.items()}
        return ChunkRecord(ChunkShape.of(key, self.groups), sums, num_tensors, num_committed)

    def reset(self) -> None:
        """Forget all groups. Tensors that autograd still holds stay valid."""
        for group in self.groups:
            if group.state is GroupState.OPEN:
                group.drop()
        self.groups.clear()
        self.open_groups.clear()
        self.key = None  # a forward that goes on in another thread is part of the next step
