"""Host memory up to its budget, and the disk for what is beyond: the way both are chained.

NOTE [ Two ways to the disk ]
    Where the device is the host, threads write a tensor as it is and read into a new one: see
    ``disk_direct.py``. Elsewhere its bytes pass through staging buffers: see ``disk_staged.py``.

NOTE [ When the disk fails ]
    What could not be written stays where it is, tensor or buffer, and later groups stay on the
    device until the next step tries again. What cannot be read back raises when it is asked for;
    asked for again, it is read again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from pp_offload._memory.disk import DiskStatistics, DiskTier
from pp_offload._memory.host import HostTier
from pp_offload._memory.unfinished import when_finished
from pp_offload._transfer.engine import TransferEngine
from pp_offload._transfer.ticket import HostCopy, Ticket, packs, place
from pp_offload.backends import Backend
from pp_offload.errors import DiskTierError, NotWhileCapturingError

logger = logging.getLogger(__name__)


class DiskTransferEngine(TransferEngine):
    """A transfer engine with a disk tier behind its host tier.

    Args:
        backend: Streams, events and copies of the device.
        host: Where the bytes go first; None to send all of them to disk.
        max_in_flight_bytes: Device bytes that may wait to be written.
        disk: Where they go when the host has no room.
    """

    def __init__(
        self,
        backend: Backend,
        host: HostTier | None,
        max_in_flight_bytes: int | None,
        disk: DiskTier,
    ) -> None:
        super().__init__(backend, host or HostTier(backend.allocate_host), max_in_flight_bytes)
        self.disk = disk
        self._is_only = host is None
        self._failure: DiskTierError | None = None
        self._has_warned = False

    def offload(self, tickets: Sequence[Ticket]) -> int:
        """Queue the copies of a group, to the host as far as it has room, else to the disk.

        Raises:
            MemoryError: Neither has room, or the disk failed in this step. What was queued before
                is of no use; the sources are as before.
        """
        self.check_process()
        if self.backend.is_capturing:
            raise NotWhileCapturingError("writing to disk cannot be part of a captured graph")
        near: list[Ticket] = []
        near_copies: list[HostCopy] = []
        total = 0
        for batch, nbytes in packs(tickets):
            copy = self._host_copy(nbytes, len(batch))
            if copy is None:
                send = partial(self._offload_far, batch, nbytes)
                total += when_finished(self.lock, send)
            else:
                near += batch
                near_copies.append(place(batch, copy))
        if near:
            with self.lock:
                total += self._queue_offload(near, near_copies)
        self._sent(total)
        return total

    def _offload_far(self, batch: list[Ticket], nbytes: int) -> int:
        self.poll()
        return self._send(batch, self._disk_copies(batch, nbytes))

    def reload(self, tickets: Sequence[Ticket]) -> int:
        """Queue the copies back, from wherever the bytes are. Never waits for a disk.

        Raises:
            DiskTierError: They were read, which failed.
        """
        self.check_process()
        self._check_capture(tickets)
        with self.lock:
            self.poll()  # which may bring some of them
            near, far = by_place(tickets)
            return self._copy_back(near) + self._fetch(far)

    def compact(self) -> None:
        """Between steps: make host memory tight, and let the next step try the disk again."""
        super().compact()
        self._failure = None

    def retire(self) -> None:
        """Drop the file as well, unless a saved tensor needs it; then it goes with the last."""
        super().retire()
        if self.disk.statistics().in_use == 0:
            self.disk.close()

    def close(self) -> None:
        """Finish all copies, then drop the host memory and the file."""
        super().close()
        self.disk.close()

    def disk_statistics(self) -> DiskStatistics:
        """What is on disk, and what was written and read."""
        return self.disk.statistics()

    def _check_capture(self, tickets: Sequence[Ticket]) -> None:
        if self.backend.is_capturing and by_place(tickets)[1]:
            raise NotWhileCapturingError(
                "reading from disk cannot be part of a captured graph; keep what it needs in host "
                'memory, with tiers=("host",)'
            )

    def _host_copy(self, nbytes: int, num_payloads: int) -> HostCopy | None:
        """Room in host memory; None if there is none."""
        if self._is_only:
            return None
        with self.lock:
            self.poll()
            with suppress(MemoryError):
                return HostCopy(self.host.allocate(nbytes, num_payloads))
        return None

    def _check_disk(self) -> None:
        if self._failure is not None:
            raise MemoryError(str(self._failure)) from self._failure

    def _note(self, failure: DiskTierError) -> None:
        """Something could not be written."""
        self._failure = failure
        logger.log(
            logging.DEBUG if self._has_warned else logging.WARNING,
            "offloaded activations could not be written and stay in memory, as will what follows "
            "in this step; from now on without a warning: %s",
            failure,
        )
        self._has_warned = True

    # What depends on the device

    def _disk_copies(self, batch: list[Ticket], nbytes: int) -> list[HostCopy]:
        """Room on disk for tickets that may share it; each gets its place.

        Raises:
            MemoryError: There is none.
            Unfinished: What is on its way has to make room first.
        """
        raise NotImplementedError

    def _send(self, tickets: Sequence[Ticket], copies: Sequence[HostCopy]) -> int:
        """Queue what brings tickets to the disk; the number of bytes."""
        raise NotImplementedError

    def _fetch(self, tickets: Sequence[Ticket]) -> int:
        """Queue what brings them back from it, or begin it; the number of payloads."""
        raise NotImplementedError


def by_place(tickets: Sequence[Ticket]) -> tuple[list[Ticket], list[Ticket]]:
    """Those in host memory alone, and those that are, or are to be, on disk, of those not back yet.

    One that could not be written is in neither: its source is kept, and given back as it is.
    """
    near: list[Ticket] = []
    far: list[Ticket] = []
    for ticket in tickets:
        copy = ticket.copy
        assert copy is not None, "reload before offload"
        if ticket.device_tensor is not None:
            continue
        if copy.extent is not None:
            far.append(ticket)
        elif copy.buffer is not None:
            near.append(ticket)
    return near, far
