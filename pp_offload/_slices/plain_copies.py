"""Copies of parameters to the device and of gradients to the host, outside of any group.

The host waits for these copies, and no stream: the program, which knows of no event, writes the
host tensors afterwards.

    coming = copies.copy_to_device(parameters, "slice 0")
    going = copies.copy_to_host(gradients, "slice 0")
    copies.synchronize(coming)  # the host waits; coming.tensors hold their data

NOTE [ Both ends ]
    Both ends of a copy stay referenced until it has run. Device sources are dropped earlier, after
    a wait of compute, when too many bytes are in flight. Host memory is not: its next owner may be
    the host, which waits for no stream.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pp_offload._common.processes import logger_of, warn_once
from pp_offload._core.geometry import as_dense
from pp_offload._core.in_flight import IN_FLIGHT_BYTES, Bound, ComputeStreams
from pp_offload._core.statistics import OffloadStatistics
from pp_offload._core.verify import check_same, checksum_of
from pp_offload._memory.addresses import outside_inference_mode
from pp_offload._memory.budget import HostBudget
from pp_offload._memory.host_pool import HostPool, host_tensors
from pp_offload.backends import Backend, Event, Stream
from pp_offload.config import OffloadConfig

logger = logger_of(__name__)


@dataclass(eq=False, slots=True)
class PendingCopy:
    """Copies in flight that were queued together; see NOTE [ Both ends ]."""

    tensors: list[Tensor]  # they hold no data until PlainCopies.synchronize() has returned
    sources: Sequence[Tensor]
    copy_stream: Stream
    stream: Stream  # compute stream that asked for them; device tensors are allocated on it
    label: str
    checksums: tuple[int, ...]
    in_flight_bytes: int = 0  # of sources on the device that the copies still need
    event: Event | None = None  # after the copies; None while these are queued, or if interrupted

    def end(self) -> Event:
        if self.event is None:
            self.event = self.copy_stream.record_event()
        return self.event


class PlainCopies:
    """Copies tensors to the device and to the host; two threads of a backward may ask at once."""

    def __init__(self, backend: Backend, config: OffloadConfig) -> None:
        self.backend = backend
        budget = HostBudget(config.host_budget_bytes)
        self._pool = HostPool(backend.allocate_host, budget, trim=backend.trim_host)
        self._streams = ComputeStreams.of(backend)
        self._bound_bytes = Bound(config.max_in_flight_bytes, IN_FLIGHT_BYTES).nbytes
        self._verify = config.verify
        self._lock = threading.RLock()  # never held during a wait
        self._under_way: list[PendingCopy] = []
        self._moved = {"bytes_offloaded": 0, "bytes_reloaded": 0}

    def copy_to_device(self, sources: Sequence[Tensor], label: str) -> PendingCopy:
        """Start copying dense host tensors to the device. Do not write them before that ends."""
        return self._queue(sources, label, to_host=False)

    def copy_to_host(self, sources: Sequence[Tensor], label: str) -> PendingCopy:
        """Start copying strided device tensors to host memory, freed with the last result, each a
        storage of its own. Compute waits for earlier copies until few enough bytes are in flight.
        """
        dense = [as_dense(source.detach()) for source in sources]
        copy = self._queue(dense, label, to_host=True)
        # Sources of this copy were needed until now: waiting for it lowers no peak.
        nbytes = sum([source.nbytes for source in dense])
        most = max(self._bound_bytes, nbytes) if self._bound_bytes else 0
        while True:
            with self._lock:
                self.poll()
                going = [each for each in self._under_way if each.in_flight_bytes]
                if sum([each.in_flight_bytes for each in going]) <= most:
                    return copy
            self._streams.wait(going[0].end())  # blocks where the device is the host: no lock
            going[0].sources, going[0].in_flight_bytes = (), 0

    def _queue(self, sources: Sequence[Tensor], label: str, *, to_host: bool) -> PendingCopy:
        backend, stream = self.backend, self.backend.current_stream()
        copy_stream = backend.d2h if to_host else backend.h2d
        nbytes = sum([source.nbytes for source in sources])
        checksums = tuple(checksum_of(as_dense(each)) for each in sources) if self._verify else ()
        with self._lock:
            self.poll()
            with outside_inference_mode():  # the program and other threads may write these
                if to_host:
                    targets = self._gradient_memory(sources)
                else:
                    targets = [torch.empty_like(each, device=backend.device) for each in sources]
            # Sources are computed, and earlier users of the targets' memory have ended.
            copy_stream.wait_event(stream.record_event())
            copy = PendingCopy(targets, sources, copy_stream, stream, label, checksums)
            if to_host:
                self._streams.follow(stream)
                copy.in_flight_bytes = nbytes
            self._moved["bytes_offloaded" if to_host else "bytes_reloaded"] += nbytes
            self._under_way.append(copy)  # first: an interrupt may come behind the copies
            backend.copy(copy_stream, targets, list(sources), label)
            copy.end()
        return copy

    def host_tensors(self, likes: Sequence[Tensor]) -> list[Tensor]:
        """Allocate host memory for parameters, each a storage of its own, also above the budget."""
        with self._lock:
            self.poll()
            return host_tensors(likes, self._pool, force=True)

    def _gradient_memory(self, likes: Sequence[Tensor]) -> list[Tensor]:
        """Allocate host memory for gradients, which copies that use it keep, too. Where the budget
        has no room, it is ordinary memory, with one warning: gradients must go somewhere.
        """
        try:
            return host_tensors(likes, self._pool)
        except MemoryError as refused:
            warn_once(
                logger,
                self,
                "gradients for which the host budget has no room are in ordinary memory; their "
                "copies are slower and block: %s",
                str(refused),
            )
            return [torch.empty_like(like, device="cpu") for like in likes]

    def synchronize(self, pending: PendingCopy) -> None:
        """Block the host until copies have run; ``verify`` raises a VerifyError if bytes differ."""
        pending.end().synchronize()
        self.poll()
        for tensor, expected in zip(pending.tensors, pending.checksums, strict=False):
            what = f"a tensor of {pending.label} with shape {tuple(tensor.shape)}"
            check_same(as_dense(tensor), expected, f"{what} came to {tensor.device}")

    def poll(self) -> None:
        """Drop what finished copies kept alive. Never blocks."""
        with self._lock:
            for copy in self._under_way[:]:
                if copy.end().query():
                    self._under_way.remove(copy)
                    copy.sources, copy.in_flight_bytes = (), 0

    def statistics(self) -> OffloadStatistics:
        """Return statistics; copies to the device count as reloaded, others as offloaded."""
        with self._lock:
            self.poll()
            numbers: dict[str, Any] = dict.fromkeys(OffloadStatistics.__dataclass_fields__, 0)
            numbers |= self._moved | {
                "bytes_in_flight": sum([copy.in_flight_bytes for copy in self._under_way]),
                "host_bytes_in_use": self._pool.in_use_bytes,
                "host_bytes_peak": self._pool.peak_bytes,
                "host_bytes_reserved": self._pool.reserved_bytes,
                "host_allocations": self._pool.num_allocations,
                "live_tensors": self._pool.num_payloads,
                "step_ms": None,
                "stalled_ms": None,
            }
            return OffloadStatistics(**numbers)

    def __del__(self) -> None:
        """Wait for copies that may still write memory freed with this: no stream does."""
        try:  # not suppress(), which Python may have cleared at exit
            if not self.backend.is_capturing:
                for copy in self._under_way:
                    copy.end().synchronize()
        except Exception:
            pass  # a copy that failed is over; at exit, the driver may be gone
