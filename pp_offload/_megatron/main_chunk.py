"""The chunk as Megatron-LM's main calls it: groups by name, a count in flight, flags on tensors.

    chunk.on_group_start_forward("mlp")
    chunk.on_group_commit_forward("mlp", [residual])

NOTE [ Flags ]
    Transformer Engine and Megatron-LM set an attribute on a tensor that is to stay on the device,
    and look at it when autograd saves that very tensor. Here the flag is read at the same moment,
    and from then on holds for the storage: while a flagged tensor lives, its memory is taken, so
    sending a view of it away would free nothing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from pp_offload._common.checks import check_count, check_kind, check_switch
from pp_offload._common.torch_private import never_compiled
from pp_offload._core.group import Group, GroupState
from pp_offload._core.saved import Packed, Resident
from pp_offload._groups.offloader import Offloader
from pp_offload._megatron import chunk as introduced
from pp_offload._megatron.graph_state import GraphState
from pp_offload._megatron.group import OffloadTensorGroup
from pp_offload._memory.pool import GPUTensorPool
from pp_offload.errors import GroupStateError

FLAGS = ("_TE_do_not_offload", "_do_not_offload")
"""Of Transformer Engine and of Megatron-LM; set to something true."""


def is_flagged(tensor: Tensor) -> bool:
    """Whether ``tensor``, or one of those that a quantized one is made of, is flagged.

    Source: Megatron-LM ``ChunkOffloadHandler.tensor_need_offloading_checker``. What a quantized
    tensor of Transformer Engine is made of is told by its ``get_data_tensors``.
    """
    if _has_flag(tensor):
        return True
    if type(tensor) in (Tensor, Parameter):
        return False
    ask = getattr(tensor, "get_data_tensors", None)
    return ask is not None and any(map(_has_flag, ask()))


def _has_flag(tensor: object) -> bool:
    return any(getattr(tensor, name, False) for name in FLAGS)


class ChunkOffloadHandler(introduced.ChunkOffloadHandler):
    """Offloads and reloads the groups of one chunk.

    Args:
        min_offloaded_tensor_size, cpu_tensor_pool, offloader, vp_stage, microbatch: As in the class
            of this name that it extends.
        max_inflight_offloads: Of this microbatch's groups of one name, how many may be on their
            way to the host without compute having waited for them. 0: compute waits for each.
            None: only ``OffloadConfig(max_in_flight_bytes=...)`` counts, as it does beside any
            number. Groups of other microbatches are counted on their own.
        graphs: Whether a graph is launched; a commit is delayed only then.

    Source: Megatron-LM ``ChunkOffloadHandler``.
    """

    def __init__(
        self,
        min_offloaded_tensor_size: int,
        cpu_tensor_pool: GPUTensorPool | None,
        max_inflight_offloads: int | None = None,
        *,
        offloader: Offloader | None = None,
        vp_stage: int = 0,
        microbatch: int | None = None,
        graphs: GraphState | None = None,
    ) -> None:
        if max_inflight_offloads is not None:
            expected = "offloads of a name; None for no limit"
            check_count("max_inflight_offloads", max_inflight_offloads, unit=expected)
        smallest, pool = min_offloaded_tensor_size, cpu_tensor_pool
        super().__init__(
            smallest, pool, offloader=offloader, vp_stage=vp_stage, microbatch=microbatch
        )
        self.max_inflight_offloads = max_inflight_offloads
        self.graphs = graphs or GraphState(self.offloader.backend)
        self._on_their_way: dict[str, deque[Any]] = defaultdict(deque)

    @never_compiled
    def pack(self, group: Group, tensor: Tensor) -> Packed:
        """Save ``tensor`` in ``group``; one that is flagged stays, and so does its storage."""
        if is_flagged(tensor):
            self.offloader.engine.eligibility.kept.add(tensor)
            return Resident(tensor)
        return super().pack(group, tensor)

    def tensor_need_offloading_checker(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is not flagged, and may be offloaded."""
        return not is_flagged(tensor) and super().tensor_need_offloading_checker(tensor)

    def commit(
        self,
        name: str,
        forced_released_tensors: Sequence[Tensor] | None = None,
        *,
        delay: bool = False,
    ) -> Group:
        """See :meth:`Chunk.commit`. It is delayed only while a graph is launched."""
        if delay and not self.graphs.is_in_replay:
            check_switch("delay_offload", delay)
            delay = False
        return super().commit(name, forced_released_tensors, delay=delay)

    def close(self, group: Group, released: Sequence[Tensor] | None) -> None:
        """Offload a group that is open no more, or keep it; compute may wait for earlier ones."""
        for tensor in released or ():
            if is_flagged(tensor):
                self.offloader.engine.eligibility.kept.add(tensor)
        super().close(group, released)
        if group.state is GroupState.OFFLOADED and self.max_inflight_offloads is not None:
            self._limit(group.name, self.max_inflight_offloads)

    def _limit(self, name: str, most: int) -> None:
        """Have compute wait for groups of this name, with the one sent last, down to ``most``."""
        mover = self.offloader.engine.mover
        with mover.lock:  # a backward of another thread takes out copies that are over
            queue = mover.in_flight.queue
            last = queue[-1].offloaded if queue else None
        if last is None:
            return
        on_their_way = self._on_their_way[name]
        on_their_way.append(last)
        while len(on_their_way) > most:
            mover.wait_up_to(on_their_way.popleft())

    def on_group_commit_forward(  # type: ignore[override]
        self, name: str, forced_released_tensors: Sequence[Tensor] | None
    ) -> None:
        """See :meth:`commit`."""
        self.commit(name, forced_released_tensors)

    bulk_offload = on_group_commit_forward  # type: ignore[assignment]

    def should_bulk_offload(self, group: Group) -> bool:  # type: ignore[override]
        """Whether an open group would leave the device if it was committed now."""
        return self._would_leave(self._open(group))

    def bulk_offload_group(self, group_to_offload: Group) -> None:  # type: ignore[override]
        """Offload an open group, whatever the plan says; without host room it stays."""
        self._send_open(self._open(group_to_offload))

    def _open(self, group: Group) -> OffloadTensorGroup:
        check_kind("group", group, Group, "a group of this chunk")
        for open_group in self.open_groups:
            if open_group is group:
                return open_group
        raise GroupStateError(
            f"group '{group.name}' is not open in this chunk; its open groups are "
            f"{[open_group.name for open_group in self.open_groups]}; give one that "
            "on_group_start_forward returned and nobody has committed"
        )

    @property
    def offload_groups(self) -> list[OffloadTensorGroup]:
        """Its groups in forward order, those of this step alone."""
        return self.groups

    @property
    def do_offload(self) -> bool:
        """Whether offload is enabled."""
        return self.offloader.engine.is_enabled

    def find_group_with_name(  # type: ignore[override]
        self, groups: Sequence[OffloadTensorGroup], name: str, start_index: int = 0
    ) -> OffloadTensorGroup | None:
        """The first of ``groups`` with this name, at or after ``start_index``."""
        return next((group for group in groups[start_index:] if group.name == name), None)

    def reset(self) -> None:
        """Forget all groups, and what is on its way. Tensors autograd still holds stay good."""
        super().reset()
        self._on_their_way.clear()
