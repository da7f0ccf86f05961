"""The chunk as Megatron-LM's main calls it: groups by name, a count in flight, flags on tensors.

    chunk.on_group_start_forward("mlp")
    chunk.on_group_commit_forward("mlp", [residual])

NOTE [ Flags ]
    Transformer Engine and Megatron-LM set an attribute on a tensor that must stay on the device,
    and read it when autograd saves that tensor. The flag is read here at the same moment, and then
    holds for the storage: while a flagged tensor lives, offloading a view of it would free nothing.
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
"""Attributes of Transformer Engine and of Megatron-LM, set to something true."""


def is_flagged(tensor: Tensor) -> bool:
    """Whether ``tensor``, or a part of a quantized tensor of Transformer Engine, is flagged.

    Source: Megatron-LM ``ChunkOffloadHandler.tensor_need_offloading_checker``.
    """
    parts = [tensor]
    if type(tensor) not in (Tensor, Parameter) and hasattr(tensor, "get_data_tensors"):
        parts += tensor.get_data_tensors()
    return any(getattr(part, name, False) for part in parts for name in FLAGS)


class ChunkOffloadHandler(introduced.ChunkOffloadHandler):
    """Offloads and reloads the groups of one chunk.

    Args:
        min_offloaded_tensor_size, cpu_tensor_pool, offloader, vp_stage, microbatch: As in the class
            of this name that it extends.
        max_inflight_offloads: How many groups of one name of this microbatch may be in flight to
            the host before compute waits for the oldest. With 0, compute waits for each; with None,
            only for ``OffloadConfig(max_in_flight_bytes=...)``, which always holds.
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
        super().__init__(
            min_offloaded_tensor_size,
            cpu_tensor_pool,
            offloader=offloader,
            vp_stage=vp_stage,
            microbatch=microbatch,
        )
        self.max_inflight_offloads = max_inflight_offloads
        self.graphs = graphs or GraphState(self.offloader.backend)
        self._in_flight: dict[str, deque[Any]] = defaultdict(deque)

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
        """See :meth:`Chunk.close`; then compute may have to wait for earlier groups."""
        for tensor in released or ():
            if is_flagged(tensor):
                self.offloader.engine.eligibility.kept.add(tensor)
        super().close(group, released)
        if group.state is GroupState.OFFLOADED and self.max_inflight_offloads is not None:
            self._limit(group.name, self.max_inflight_offloads)

    def _limit(self, name: str, most: int) -> None:
        """Note the copies queued last, and have compute wait until ``most`` groups are left."""
        mover = self.offloader.engine.mover
        with mover.lock:  # a backward of another thread takes out copies that are over
            queue = mover.in_flight.queue
            last = queue[-1].offloaded if queue else None
        if last is None:
            return
        in_flight = self._in_flight[name]
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
        """See :meth:`Chunk.reset`."""
        super().reset()
        self._in_flight.clear()
