"""Offload of all activations of a model on one device, without groups to mark.

    with OffloadActivations():
        loss = model(x).mean()
    loss.backward()

What autograd saves inside joins a stash on the device; a stash that is full goes to the host as a
group, and comes back, in reverse order, ahead of its backward. The last stash of a forward stays,
for its backward comes next; if another forward begins instead, it goes as well. Each entering is a
microbatch of its own, so any number may be in flight.

A decoder's output head is best left out: what it saves is large, and needed at once. See
:func:`pp_offload.heads.get_lora_act_offloading_ctx_manager`.
"""

from __future__ import annotations

from contextlib import ContextDecorator

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

from pp_offload.backends import Backend, default_backend
from pp_offload.chain import make_engine
from pp_offload.chunk import ChunkOffloadHandler
from pp_offload.chunk_queue import ChunkQueue
from pp_offload.config import OffloadConfig
from pp_offload.group import GroupState, OffloadTensorGroup
from pp_offload.prefetch import Prefetcher
from pp_offload.saved import Packed, Resident, is_in_backward, unpack
from pp_offload.services import Services
from pp_offload.statistics import OffloadStatistics, collect
from pp_offload.step import StepRecord
from pp_offload.tensors import Eligibility, StorageSet
from pp_offload.tiers.slabs import pageable

GROUP = "activations"


class OffloadActivations(saved_tensors_hooks, ContextDecorator):
    """Offload what autograd saves inside.

    Args:
        use_pin_memory: Put it in pinned memory, which copies need to run beside compute.
        use_streams: Let them; otherwise compute waits for every copy.
        min_offload_size: Smaller tensors stay on the device. In bytes.
        max_fwd_stash_size: How many tensors may be on the device before they leave together.
        backend: Device to work on; the accelerator where there is one, else the CPU.

    Raises:
        ValueError: ``max_fwd_stash_size`` is below 1, or ``min_offload_size`` below 0.

    Source: torchtune and TRL ``OffloadActivations``.
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_size: int = 1024,
        max_fwd_stash_size: int = 5,
        *,
        backend: Backend | None = None,
    ) -> None:
        if max_fwd_stash_size < 1 or min_offload_size < 0:
            raise ValueError(
                f"max_fwd_stash_size is {max_fwd_stash_size} and min_offload_size "
                f"{min_offload_size}; expected at least 1 tensor, and at least 0 bytes"
            )
        super().__init__(self._pack, unpack)
        self.min_offload_size = min_offload_size
        self.max_fwd_stash_size = max_fwd_stash_size
        self._step = StepRecord(ChunkQueue())
        self._services = _services(
            backend or default_backend(), self._step, use_pin_memory, use_streams
        )
        self._chunk: ChunkOffloadHandler | None = None
        self._stash: OffloadTensorGroup | None = None

    def __enter__(self) -> OffloadActivations:  # type: ignore[override]
        """Begin the forward of a microbatch."""
        self._send_stash()
        self._step.forget_finished()
        self._services.transfer.fit()
        self._chunk = ChunkOffloadHandler(0, None, services=self._services)
        super().__enter__()
        return self

    def keep_module(self, model: Module) -> None:
        """Leave parameters and buffers where they are, whichever view of them is saved."""
        self._services.eligibility.kept.add_module(model)

    def statistics(self) -> OffloadStatistics:
        """What was moved and what is in use, exact at the call."""
        return collect(self._services.transfer)

    def _pack(self, tensor: Tensor) -> Packed:
        chunk = self._chunk
        if chunk is None or tensor.nbytes < self.min_offload_size or is_in_backward():
            return Resident(tensor)
        stash = self._stash
        if stash is not None and stash.is_used:
            stash = None  # a backward inside the context: it stays
        if stash is None:
            stash = self._stash = chunk.on_group_start_forward(GROUP)
        packed = chunk.pack(stash, tensor)
        if not isinstance(packed, Resident) and stash.num_saved >= self.max_fwd_stash_size:
            self._send_stash()
        return packed

    def _send_stash(self) -> None:
        stash, self._stash = self._stash, None
        if stash is not None and stash.state is GroupState.OPEN and self._chunk is not None:
            self._chunk.commit(GROUP)


class NoOpManager(saved_tensors_hooks, ContextDecorator):
    """What autograd saves inside stays on the device, also inside :class:`OffloadActivations`."""

    def __init__(self) -> None:
        super().__init__(Resident, unpack)


def _services(
    backend: Backend, step: StepRecord, use_pin_memory: bool, use_streams: bool
) -> Services:
    """The engine, without a manager."""
    config = OffloadConfig() if use_streams else OffloadConfig(max_in_flight_bytes=0)
    transfer = make_engine(backend, config, None if use_pin_memory else pageable)
    return Services(
        transfer,
        Eligibility(backend.device, StorageSet()),
        Prefetcher(transfer, step, None if use_streams else 0),
        step.queue,
        on_change=step.change,
        number_chunk=step.add,
    )
