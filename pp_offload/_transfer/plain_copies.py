"""Copies of tensors that are no payload of a group, such as parameters and their gradients.

They are ordered like the transfer engine's own. But the host waits for them, not a stream: the
program, which knows of no event, writes the host tensors afterwards.

    coming = copies.copy_to_device(parameters, "slice 0")
    going = copies.copy_to_host(gradients, "slice 0")
    tensors = copies.synchronize(coming)  # the host waits; they hold their data
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from pp_offload._core.tensors import as_dense
from pp_offload._memory.budget import RAISE_IT, HostBudget
from pp_offload._memory.buffers import as_tensor
from pp_offload._memory.host import HostMemory
from pp_offload._memory.host_pool import pageable
from pp_offload._memory.host_tensors import host_tensors
from pp_offload._transfer.copies import Queued, record, wait
from pp_offload._transfer.tiers import host_engine
from pp_offload._transfer.verify import check_same, checksum_of
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


class PlainCopies:
    """Copies tensors to the device and to the host; two threads of a backward may ask at once.

    Args:
        backend: Device to work on.
        config: How much host memory, and how much in flight; whether to ``verify``.

    Attributes:
        transfer: Its lock, listeners and cap on bytes in flight are used.
    """

    def __init__(self, backend: Backend, config: OffloadConfig) -> None:
        budget, trim = HostBudget(config.host_budget_bytes, RAISE_IT), backend.trim_host
        # Each buffer is one piece, for these tensors are used where they are.
        self._host = HostMemory(backend.allocate_host, budget, may_split=False, trim=trim)
        self.transfer = host_engine(backend, self._host, config.max_in_flight_bytes)
        self._verify = config.verify
        self._has_warned = False
        self._in_use: list[tuple[Event, Sequence[Tensor]]] = []

    def copy_to_device(self, sources: Sequence[Tensor], label: str) -> PendingCopy:
        """Start copying host tensors to the device.

        Args:
            sources: At least one dense tensor on the host, none of which requires grad; not
                written until :meth:`synchronize` has returned.
            label: For messages.

        Returns:
            Device tensors of the same shapes, dtypes and layouts.
        """
        backend = self.transfer.backend
        stream = backend.current_stream()
        checksums = self._checksums(sources)
        with self.transfer.lock:
            self.poll()
            with torch.inference_mode(False):  # other threads are not in it, and may write them
                targets = [torch.empty_like(one, device=backend.device) for one in sources]
            wait(backend.h2d, record(stream))
            copied = self._copy(backend.h2d, targets, sources, [*sources, *targets], label)
            nbytes = sum(one.nbytes for one in sources)
            for heard in self.transfer.listeners.reload_started:
                heard(label, nbytes)
        return PendingCopy(targets, copied, stream, label, checksums)

    def copy_to_host(self, sources: Sequence[Tensor], label: str) -> PendingCopy:
        """Start copying device tensors to host memory, free again when the results are gone.

        Where the host budget has no room they go to ordinary memory, with one warning: gradients
        have to go somewhere.

        Args:
            sources: At least one strided tensor on the device; kept alive until they are copied.
            label: For messages.

        Returns:
            Host tensors of the same shapes and dtypes, in one allocation, each a storage of its
            own.
        """
        backend = self.transfer.backend
        stream = backend.current_stream()
        dense = [as_dense(source.detach()) for source in sources]
        checksums = self._checksums(dense)
        with self.transfer.lock:
            self.poll()
            with torch.inference_mode(False):  # the program could not go on with inference tensors
                targets = host_tensors(dense, self._gradient_memory)
            wait(backend.d2h, record(stream))
            nbytes = sum(one.nbytes for one in dense)
            offload = self.transfer.copies.in_flight.begin(dense, (), [stream], nbytes)
            # ``_copy`` keeps its targets: a wait of a stream does not let the host free them
            offload.offloaded = copied = self._copy(backend.d2h, targets, dense, targets, label)
            for heard in self.transfer.listeners.offloaded:
                heard(label, nbytes)
        self.transfer.keep_in_flight_bounded(nbytes)
        return PendingCopy(targets, copied, stream, label, checksums)

    def _copy(
        self,
        stream: Stream,
        targets: list[Tensor],
        sources: Sequence[Tensor],
        kept: Sequence[Tensor],
        label: str,
    ) -> Event:
        """Queue copies on ``stream``, and keep what they use, also if an interrupt comes next.

        See NOTE [ Torn bookkeeping ].
        """
        self._in_use.append((Queued(stream), kept))
        self.transfer.backend.copy(stream, targets, list(sources), label)
        event = record(stream)
        self._in_use[-1] = event, kept
        return event

    def host_tensors(self, likes: Sequence[Tensor]) -> list[Tensor]:
        """Host memory, in one allocation, for tensors that must have it, such as parameters.

        Each is a storage of its own, for a program may save or copy some of them alone. The memory
        counts in the budget, and is given even where that is used up.
        """
        host = self._host
        return host_tensors(likes, lambda nbytes: as_tensor(host.allocate(nbytes, force=True)))

    def _gradient_memory(self, nbytes: int) -> Tensor:
        """Memory of the host tier, free again without views; copies that use it keep one, too."""
        try:
            return as_tensor(self._host.allocate(nbytes))
        except MemoryError as refused:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "gradients for which the host budget has no room are in ordinary memory; their "
                    "copies are slower and block: %s",
                    str(refused),
                )
            return pageable(nbytes)

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
        return tuple(checksum_of(as_dense(one)) for one in tensors) if self._verify else ()

    def poll(self) -> None:
        """Let go of what finished copies kept alive. Never blocks."""
        with self.transfer.lock:
            self.transfer.poll()
            self._in_use = [one for one in self._in_use if not one[0].query()]

    def __del__(self) -> None:
        """Wait for copies that may still write memory which goes with this: no stream does."""
        with suppress(Exception):  # a copy that failed is over; at exit, the driver may be gone
            if not self.transfer.backend.is_capturing:
                for event, _ in self._in_use:
                    event.synchronize()
