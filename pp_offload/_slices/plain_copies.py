"""Copies of tensors that are no payload of a group, such as parameters and their gradients.

The host waits for these copies, and no stream: the program, which knows of no event, writes the
host tensors afterwards.

    coming = copies.copy_to_device(parameters, "slice 0")
    going = copies.copy_to_host(gradients, "slice 0")
    tensors = copies.synchronize(coming)  # the host waits; they hold their data

NOTE [ Both ends ]
    Both ends of a copy stay referenced until it has run. Sources on the device are let go earlier,
    after a wait of compute, when more bytes are in flight than may be. Host memory is not: the host
    may give it to another, who knows of no stream.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from pp_offload._core.bound import IN_FLIGHT_BYTES, Bound
from pp_offload._core.in_flight import ComputeStreams
from pp_offload._core.statistics import OffloadStatistics
from pp_offload._core.tensors import as_dense
from pp_offload._core.verify import check_same, checksum_of
from pp_offload._memory.budget import RAISE_IT, HostBudget
from pp_offload._memory.host_pool import HostPool
from pp_offload._memory.host_tensors import host_tensors
from pp_offload.backends import Backend, Event, Stream
from pp_offload.config import OffloadConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """Copies under way."""

    tensors: list[Tensor]
    """They hold no data until :meth:`PlainCopies.synchronize` has returned."""

    event: Event
    """Behind the copies."""

    stream: Stream
    """The compute stream that asked for them; device tensors are allocated on it."""

    label: str
    """For messages."""

    checksums: tuple[int, ...] = ()
    """Checksums of the sources, with ``verify``."""


class UnderWay:
    """What copies use that were queued together; see NOTE [ Both ends ].

    Attributes:
        sources: On the device, if they go to the host.
        others: The rest of both ends.
        event: Behind the copies; None while they are being queued, or if an interrupt came then.
    """

    __slots__ = ("event", "others", "sources", "stream")

    def __init__(self, stream: Stream, sources: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        self.stream = stream
        self.sources = sources
        self.others = others
        self.event: Event | None = None

    @property
    def nbytes(self) -> int:
        """Device bytes that are kept for copies to the host."""
        return sum([source.nbytes for source in self.sources])

    def end(self) -> Event:
        """Behind the copies."""
        if self.event is None:
            self.event = self.stream.record_event()
        return self.event


class PlainCopies:
    """Copies tensors to the device and to the host; two threads of a backward may ask at once.

    Args:
        backend: Device to work on.
        config: How much host memory, and how much in flight; whether to ``verify``.

    Attributes:
        backend: The device.
    """

    def __init__(self, backend: Backend, config: OffloadConfig) -> None:
        self.backend = backend
        budget = HostBudget(config.host_budget_bytes, RAISE_IT)
        self._pool = HostPool(backend.allocate_host, budget, trim=backend.trim_host)
        self._streams = ComputeStreams.of(backend)
        self._bound = Bound(config.max_in_flight_bytes, IN_FLIGHT_BYTES)
        self._verify = config.verify
        self._has_warned = False
        self._lock = threading.RLock()  # never held during a wait
        self._under_way: list[UnderWay] = []
        self._bytes_offloaded = self._bytes_reloaded = 0

    def copy_to_device(self, sources: Sequence[Tensor], label: str) -> PendingCopy:
        """Start copying host tensors to the device.

        Args:
            sources: At least one dense tensor on the host, none of which requires grad; not
                written until :meth:`synchronize` has returned.
            label: For messages.

        Returns:
            Device tensors of the same shapes, dtypes and layouts.
        """
        backend, stream = self.backend, self.backend.current_stream()
        checksums = self._checksums(sources)
        with self._lock:
            self.poll()
            with torch.inference_mode(False):  # other threads are not in it, and may write them
                targets = [torch.empty_like(source, device=backend.device) for source in sources]
            backend.h2d.wait_event(stream.record_event())  # former users of the memory are done
            ends = UnderWay(backend.h2d, (), [*sources, *targets])
            event = self._copy(ends, targets, sources, label)
            self._bytes_reloaded += sum([source.nbytes for source in sources])
        return PendingCopy(targets, event, stream, label, checksums)

    def copy_to_host(self, sources: Sequence[Tensor], label: str) -> PendingCopy:
        """Start copying device tensors to host memory, free again when the results are gone.

        Where the host budget has no room they go to ordinary memory, with one warning: gradients
        have to go somewhere.

        Args:
            sources: At least one strided tensor on the device; kept alive until they are copied.
            label: For messages.

        Returns:
            Host tensors of the same shapes and dtypes, each a storage of its own. The memory is
            free when all of them are gone.
        """
        backend, stream = self.backend, self.backend.current_stream()
        dense = [as_dense(source.detach()) for source in sources]
        nbytes = sum([source.nbytes for source in dense])
        checksums = self._checksums(dense)
        with self._lock:
            self.poll()
            with torch.inference_mode(False):  # the program could not go on with inference tensors
                targets = self._gradient_memory(dense)
            self._streams.follow(stream)
            backend.d2h.wait_event(stream.record_event())  # the sources are computed
            event = self._copy(UnderWay(backend.d2h, dense, targets), targets, dense, label)
            self._bytes_offloaded += nbytes
        self._keep_bounded(nbytes)
        return PendingCopy(targets, event, stream, label, checksums)

    def _copy(
        self, ends: UnderWay, targets: list[Tensor], sources: Sequence[Tensor], label: str
    ) -> Event:
        """Queue copies, and keep what they use from before: an interrupt may come behind them."""
        self._under_way.append(ends)
        self.backend.copy(ends.stream, targets, list(sources), label)
        return ends.end()

    def _keep_bounded(self, last_bytes: int) -> None:
        """Have compute wait for copies to the host until no more is in flight than may be.

        Args:
            last_bytes: Of the last copy. Its sources had to be there until now, so a wait for it
                would take time and lower no peak.
        """
        bound = self._bound.nbytes
        most = max(bound, last_bytes) if bound else 0
        while True:
            with self._lock:
                self.poll()
                left = [ends for ends in self._under_way if ends.sources]
                if sum([ends.nbytes for ends in left]) <= most:
                    return
            self._streams.wait(left[0].end())  # blocks where the device is the host: no lock
            left[0].sources = ()

    def host_tensors(self, likes: Sequence[Tensor]) -> list[Tensor]:
        """Host memory for tensors that must have it, such as parameters.

        Each is a storage of its own, for a program may save or copy some of them alone. The memory
        counts in the budget, and is given even where that is used up.
        """
        with self._lock:
            self.poll()
            return host_tensors(likes, self._pool, force=True)

    def _gradient_memory(self, likes: Sequence[Tensor]) -> list[Tensor]:
        """Host memory; copies that use it keep it, too."""
        try:
            return host_tensors(likes, self._pool)
        except MemoryError as refused:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "gradients for which the host budget has no room are in ordinary memory; their "
                    "copies are slower and block: %s",
                    str(refused),
                )
            return [torch.empty_like(like, device="cpu") for like in likes]

    def synchronize(self, pending: PendingCopy) -> list[Tensor]:
        """Block the host until the copies have run; the tensors, which hold their data now.

        Raises:
            VerifyError: They are not what was copied. Only with ``verify``.
        """
        pending.event.synchronize()
        self.poll()
        for tensor, expected in zip(pending.tensors, pending.checksums, strict=False):
            what = f"a tensor of {pending.label} with shape {tuple(tensor.shape)}"
            check_same(as_dense(tensor), expected, f"{what} came to {tensor.device}")
        return pending.tensors

    def _checksums(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        return tuple(checksum_of(as_dense(tensor)) for tensor in tensors) if self._verify else ()

    def poll(self) -> None:
        """Let go of what finished copies kept alive. Never blocks."""
        with self._lock:
            self._under_way = [ends for ends in self._under_way if not ends.end().query()]

    def statistics(self) -> OffloadStatistics:
        """Copies to the device count as reloaded, those to the host as offloaded."""
        with self._lock:
            self.poll()
            pool = self._pool
            return OffloadStatistics(
                bytes_offloaded=self._bytes_offloaded,
                bytes_reloaded=self._bytes_reloaded,
                bytes_computed_again=0,
                host_bytes_in_use=pool.in_use_bytes,
                host_bytes_peak=pool.peak_bytes,
                host_bytes_reserved=pool.reserved_bytes,
                bytes_in_flight=sum([ends.nbytes for ends in self._under_way]),
                bytes_reloaded_unused=0,
                live_tensors=pool.num_payloads,
                prefetched_reloads=0,
                on_demand_reloads=0,
                taken_back=0,
                stalled_ms=None,
                host_allocations=pool.num_allocations,
                disk_bytes_in_use=0,
                disk_bytes_peak=0,
                disk_bytes_written=0,
                disk_bytes_read=0,
            )

    def __del__(self) -> None:
        """Wait for copies that may still write memory which goes with this: no stream does."""
        with suppress(Exception):  # a copy that failed is over; at exit, the driver may be gone
            if not self.backend.is_capturing:
                for ends in self._under_way:
                    ends.end().synchronize()
