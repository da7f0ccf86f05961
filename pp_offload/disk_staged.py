"""The disk tier behind a device: bytes pass through staging buffers in host memory.

    on the way    arriving    d2h copies into the buffer
                  writing     a thread writes the buffer to the extent
    at rest                   the extent alone
    on the way    reading     a thread reads the extent into another buffer
                  leaving     h2d copies it to the device; then the extent alone again

What is needed before it is at rest is taken from its buffer. What could not be written stays there.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from pp_offload.backends import Backend
from pp_offload.disk_transfer import DiskTransferEngine, by_place
from pp_offload.errors import DiskTierError
from pp_offload.ticket import HostCopy, Ticket, place
from pp_offload.tiers.disk import DiskTier
from pp_offload.tiers.host import HostBuffer, HostTier


class StagedDiskEngine(DiskTransferEngine):
    """Brings bytes of a device to disk, and back.

    Args:
        staging: Host memory on the way, in whole pieces.
    """

    def __init__(
        self,
        backend: Backend,
        host: HostTier | None,
        max_in_flight_bytes: int,
        disk: DiskTier,
        staging: HostTier,
    ) -> None:
        super().__init__(backend, host, max_in_flight_bytes, disk)
        self.staging = staging
        self._arriving: deque[weakref.ref[HostCopy]] = deque()
        self._writing: deque[weakref.ref[HostCopy]] = deque()
        self._read_ahead: deque[weakref.ref[HostCopy]] = deque()
        self._tickets: weakref.WeakKeyDictionary[HostCopy, list[weakref.ref[Ticket]]]
        self._tickets = weakref.WeakKeyDictionary()

    def prefetch(self, tickets: Sequence[Ticket]) -> None:
        """A reload ahead of its use. What is on disk is read first, by threads.

        What shares an extent comes together. Where no staging buffer is free, it is left to be read
        when it is needed.
        """
        self.poll()
        near, far = by_place(tickets)
        here = [ticket for ticket in far if ticket.copy is not None and ticket.copy.buffer]
        if near or here:
            self.counters.prefetched_reloads += len(near) + len(here)
            self._copy_back(near + here)
        for copy, asked in by_copy([ticket for ticket in far if not ticket.is_coming]).items():
            if copy.buffer is None and self._begin_to_read(copy, is_ahead=True):
                self._read_ahead.append(weakref.ref(copy))
                self._know(copy, asked)
                for ticket in self._all_of(copy, asked):
                    self.counters.prefetched_reloads += 1
                    ticket.reading = True
                    self.landed_bytes += ticket.nbytes

    def deliver(self, ticket: Ticket) -> Tensor:
        """The payload on the device, ready for the live compute stream.

        Raises:
            DiskTierError: It cannot be read back.
            SavedTensorModifiedError: It was changed in place before it was copied.
        """
        if self._read_ahead:
            self.poll()
        return super().deliver(ticket)

    def poll(self) -> None:
        """Send on what has arrived, let go of what is on disk, copy what was read. Never blocks."""
        super().poll()
        while self._arriving and _has_arrived(self._arriving[0]()):
            self._write(self._arriving.popleft()())
        while self._writing and _is_written(self._writing[0]()):
            self._settle(self._writing.popleft()())
        while self._read_ahead and _was_read(self._read_ahead[0]()):
            self._send_ahead(self._read_ahead.popleft()())

    @property
    def host_tiers(self) -> tuple[HostTier, ...]:
        """Host memory: where bytes rest, and where they pass through."""
        return self.host, self.staging

    # To the disk

    def _disk_copies(self, batch: list[Ticket], nbytes: int) -> list[HostCopy]:
        self._check_disk()
        copy = HostCopy(self.staging, self._stage(nbytes))
        copy.extent = self.disk.take(nbytes, len(batch))
        self._tickets[copy] = [weakref.ref(ticket) for ticket in batch]
        return [place(batch, copy)]

    def _send(self, tickets: Sequence[Ticket], copies: Sequence[HostCopy]) -> int:
        nbytes = self._queue_offload(tickets, copies)
        self._arriving += map(weakref.ref, copies)
        self.poll()
        return nbytes

    def _write(self, copy: HostCopy | None) -> None:
        if copy is not None and copy.buffer is not None and copy.extent is not None:
            written = self.disk.write(copy.extent, copy.buffer.pieces[0])
            copy.buffer.before += (written,)
            self._writing.append(weakref.ref(copy))

    def _settle(self, copy: HostCopy | None) -> None:
        """The write has ended, well or not."""
        if copy is None or copy.extent is None:
            return
        if copy.extent.failure is None:
            copy.drop_buffer()
        else:
            self._note(copy.extent.failure)
            copy.drop_extent()

    # Back from it

    def _fetch(self, tickets: Sequence[Ticket]) -> None:
        groups = by_copy(tickets)
        for copy in groups:
            if copy.buffer is None:
                self._begin_to_read(copy, is_ahead=False)
        for copy, asked in groups.items():
            if copy.buffer is None:  # what came before it needed the room
                self._begin_to_read(copy, is_ahead=False)
            self._finish_reading(copy)
            self._leave(copy, asked)

    def _begin_to_read(self, copy: HostCopy, *, is_ahead: bool) -> bool:
        """Have a thread read a copy at rest. False if there is no buffer, and it can wait."""
        extent = copy.extent
        assert extent is not None, "not on disk"
        try:
            buffer = self._stage(extent.nbytes, may_wait=not is_ahead)
        except MemoryError:
            if is_ahead:
                return False
            buffer = finished(self.staging.take(extent.nbytes, force=True))
        copy.tier, copy.buffer, copy.offloaded = self.staging, buffer, None
        copy.reading = buffer.last_use = self.disk.read(extent, buffer.pieces[0])
        return True

    def _finish_reading(self, copy: HostCopy) -> None:
        reading, copy.reading = copy.reading, None
        if reading is not None:
            try:
                reading.synchronize()
            except DiskTierError:
                copy.drop_buffer()
                for ticket in self._all_of(copy, ()):
                    self._drop_landed(ticket)
                raise

    def _leave(self, copy: HostCopy, asked: Sequence[Ticket]) -> None:
        """Queue the copies to the device. A buffer that was read into has served all who wait."""
        if copy.offloaded is None:
            tickets = self._all_of(copy, asked)
            if tickets:  # or those it was read for are gone
                self._copy_back(tickets)
            copy.drop_buffer()
        else:
            self._copy_back(asked)

    def _know(self, copy: HostCopy, tickets: Sequence[Ticket]) -> None:
        """Some of these may be of a later group that shares the copy."""
        known = self._tickets.setdefault(copy, [])
        mates = {ref() for ref in known}
        known += [weakref.ref(ticket) for ticket in tickets if ticket not in mates]

    def _all_of(self, copy: HostCopy, asked: Sequence[Ticket]) -> list[Ticket]:
        """The tickets with bytes in ``copy`` that are asked for or will be, and are not there."""
        mates = [t for ref in self._tickets.get(copy, ()) if (t := ref()) is not None]
        more = [t for t in mates if t.num_waiting > 0 and t.landed is None and t not in asked]
        return [*asked, *more]

    def _send_ahead(self, copy: HostCopy | None) -> None:
        """What was read ahead goes on to the device, unless that was done when it was needed."""
        if copy is not None and copy.reading is not None:
            with suppress(DiskTierError):  # whoever asks for it will hear of it
                self._finish_reading(copy)
                self._leave(copy, ())

    # Buffers on the way

    def _stage(self, nbytes: int, *, may_wait: bool = True) -> HostBuffer:
        """A buffer nobody uses any more; waits for others to arrive if too many are on the way.

        Raises:
            MemoryError: It would be over the budget, with none on the way or none to wait for.
        """
        while self.staging.statistics().in_use + nbytes > self._max_in_flight_bytes:
            if not may_wait:
                raise MemoryError("too many bytes are on the way to and from the disk")
            if not self._make_room():
                break
        while True:
            try:
                return finished(self.staging.take(nbytes))
            except MemoryError:
                if not may_wait or not self._make_room():
                    raise

    def _make_room(self) -> bool:
        """Wait for the copy that is furthest on its way. False if there is none."""
        if self._writing:
            copy = self._writing.popleft()()
            if copy is not None and copy.extent is not None and copy.extent.last_use is not None:
                with suppress(DiskTierError):
                    copy.extent.last_use.synchronize()
                self._settle(copy)
        elif self._arriving:
            copy = self._arriving.popleft()()
            if copy is not None and copy.offloaded is not None:
                copy.offloaded.synchronize()
                self._write(copy)
        else:
            return False
        return True


def finished(buffer: HostBuffer) -> HostBuffer:
    """The buffer, once the threads and copies of its last owner are done with it."""
    for event in buffer.last_uses():
        with suppress(DiskTierError):  # its owner heard of it
            event.synchronize()
    buffer.last_use, buffer.before = None, ()
    return buffer


def by_copy(tickets: Sequence[Ticket]) -> dict[HostCopy, list[Ticket]]:
    """Tickets by the copy that holds their bytes, in order."""
    groups: dict[HostCopy, list[Ticket]] = {}
    for ticket in tickets:
        assert ticket.copy is not None, "reload before offload"
        groups.setdefault(ticket.copy, []).append(ticket)
    return groups


def _has_arrived(copy: HostCopy | None) -> bool:
    return copy is None or copy.offloaded is None or copy.offloaded.query()


def _is_written(copy: HostCopy | None) -> bool:
    extent = None if copy is None else copy.extent
    return extent is None or extent.checksum is not None or extent.failure is not None


def _was_read(copy: HostCopy | None) -> bool:
    return copy is None or copy.reading is None or copy.reading.query()
