"""Saved tensors of forwards in which nobody marks groups: they gather, and leave together.

What was saved last is a group that is open. It leaves when that is said, or when it has as many
tensors as it may; groups come back in reverse order, ahead of their backward. Every forward is a
microbatch of its own, so any number may be in flight.

    stash.begin()               # the forward of a microbatch
    packed = stash.pack(tensor) # as a pack hook
    stash.send()                # what gathered leaves
    packed.unpack()
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module

from pp_offload.backends import Backend, default_backend
from pp_offload.chain import make_engine
from pp_offload.chunk import ChunkOffloadHandler
from pp_offload.chunk_queue import ChunkQueue
from pp_offload.config import OffloadConfig
from pp_offload.group import GroupState, OffloadTensorGroup
from pp_offload.prefetch import Prefetcher
from pp_offload.saved import Packed, Resident, is_in_backward
from pp_offload.services import Services
from pp_offload.statistics import OffloadStatistics, collect
from pp_offload.step import StepRecord
from pp_offload.tensors import Eligibility, StorageSet
from pp_offload.tiers.slabs import pageable
from pp_offload.verify import Verifier


class ActivationStash:
    """Gathers saved tensors, and offloads them together.

    Args:
        name: Of its groups, for messages.
        config: Which tiers, and how much of them. What it says of groups does not count.
        min_offload_size: Smaller tensors stay on the device. In bytes.
        max_tensors: As many are sent without being told to; None for no limit.
        use_pin_memory: Offload to memory that copies need to run beside compute.
        backend: Device to work on; the accelerator where there is one, else the CPU.
    """

    def __init__(
        self,
        name: str,
        config: OffloadConfig | None = None,
        *,
        min_offload_size: int = 1024,
        max_tensors: int | None = None,
        use_pin_memory: bool = True,
        backend: Backend | None = None,
    ) -> None:
        self.name = name
        self.min_offload_size = min_offload_size
        self.max_tensors = max_tensors
        self._step = StepRecord(ChunkQueue())
        self._services = _services(
            backend or default_backend(), config or OffloadConfig(), self._step, use_pin_memory
        )
        self._chunk: ChunkOffloadHandler | None = None
        self._open: OffloadTensorGroup | None = None

    def begin(self) -> None:
        """The forward of a microbatch begins; what the last one left here is sent."""
        self.send()
        self._step.forget_finished()
        self._services.copies.forget_dead()
        self._services.transfer.fit()
        if self._services.verifier is not None:
            self._services.verifier.check_freed()
        self._chunk = ChunkOffloadHandler(0, None, services=self._services)

    @property
    def is_over(self) -> bool:
        """Whether no forward has begun, or its backward has."""
        chunk = self._chunk
        return chunk is None or bool(chunk.groups and chunk.groups[-1].is_used)

    def keep_module(self, model: Module) -> None:
        """Leave parameters and buffers where they are, whichever view of them is saved."""
        self._services.eligibility.kept.add_module(model)

    def keep(self, tensor: Tensor) -> None:
        """Leave ``tensor`` and its views where they are."""
        self._services.eligibility.kept.add(tensor)

    def statistics(self) -> OffloadStatistics:
        """What was moved and what is in use, exact at the call."""
        return collect(self._services.transfer)

    def pack(self, tensor: Tensor) -> Packed:
        """Save ``tensor``; it leaves with the others."""
        chunk = self._chunk
        if chunk is None or is_in_backward():
            return Resident(tensor)
        is_dense = tensor.layout is torch.strided and not tensor.is_nested
        if is_dense and tensor.nbytes < self.min_offload_size:
            return Resident(tensor)
        group = self._open
        if group is not None and group.is_used:
            group = None  # a backward inside the forward has used it: it stays on the device
        if group is None:
            group = self._open = chunk.on_group_start_forward(self.name)
        packed = chunk.pack(group, tensor)
        if self.max_tensors is not None and not isinstance(packed, Resident):
            if group.num_saved >= self.max_tensors:
                self.send()
        return packed

    def send(self) -> None:
        """Offload what has gathered."""
        group, self._open = self._open, None
        if group is not None and group.state is GroupState.OPEN and self._chunk is not None:
            self._chunk.commit(self.name)


def _services(
    backend: Backend, config: OffloadConfig, step: StepRecord, use_pin_memory: bool
) -> Services:
    """The engine, without a manager."""
    transfer = make_engine(backend, config, None if use_pin_memory else pageable)
    return Services(
        transfer,
        Eligibility(backend.device, StorageSet()),
        Prefetcher(transfer, step, config.prefetch_bytes),
        step.queue,
        verifier=Verifier(transfer) if config.verify else None,
        on_change=step.change,
        number_chunk=step.add,
    )
