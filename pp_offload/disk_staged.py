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

from pp_offload.backends import Backend, Event
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
        self._read_ahead: deque[tuple[weakref.ref[HostCopy], list[weakref.ref[Ticket]]]] = deque()

    def prefetch(self, tickets: Sequence[Ticket]) -> None:
        """A reload ahead of its use. What is on disk is read first, by threads.

        Where no staging buffer is free, it is left to be read when it is needed.
        """
        near, far = by_place(tickets)
        if near:
            super().prefetch(near)
        for copy, mates in by_copy(far).items():
            if copy.buffer is None and not self._begin_to_read(copy, is_ahead=True):
                continue
            self.counters.prefetched_reloads += len(mates)
            for ticket in mates:
                ticket.reading = True
                self.landed_bytes += ticket.nbytes
            self._read_ahead.append((weakref.ref(copy), [weakref.ref(t) for t in mates]))
        self.poll()

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
        while self._read_ahead and _was_read(self._read_ahead[0][0]()):
            ref, mates = self._read_ahead.popleft()
            self._send_ahead(ref(), mates)

    @property
    def host_tiers(self) -> tuple[HostTier, ...]:
        """Host memory: where bytes rest, and where they pass through."""
        return self.host, self.staging

    # To the disk

    def _disk_copies(self, batch: list[Ticket], nbytes: int) -> list[HostCopy]:
        self._check_disk()
        copy = HostCopy(self.staging, self._stage(nbytes))
        copy.extent = self.disk.take(nbytes, len(batch))
        return [place(batch, copy)]

    def _send(self, tickets: Sequence[Ticket], copies: Sequence[HostCopy]) -> int:
        nbytes = self._queue_offload(tickets, copies)
        self._arriving += map(weakref.ref, copies)
        self.poll()
        return nbytes

    def _write(self, copy: HostCopy | None) -> None:
        if copy is not None and copy.buffer is not None and copy.extent is not None:
            written = self.disk.write(copy.extent, copy.buffer.pieces[0])
            copy.buffer.last_use = both(copy.buffer.last_use, written)
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
        for copy, mates in groups.items():
            self._finish_reading(copy, mates)
            self._leave(copy, mates)

    def _begin_to_read(self, copy: HostCopy, *, is_ahead: bool) -> bool:
        """Have a thread read a copy at rest. False if there is no buffer, and it can wait."""
        extent = copy.extent
        assert extent is not None, "not on disk"
        try:
            buffer = self._stage(extent.nbytes)
        except MemoryError:
            if is_ahead:
                return False
            buffer = finished(self.staging.take_over_budget(extent.nbytes))
        copy.tier, copy.buffer, copy.offloaded = self.staging, buffer, None
        copy.reading = buffer.last_use = self.disk.read(extent, buffer.pieces[0])
        return True

    def _finish_reading(self, copy: HostCopy, mates: Sequence[Ticket]) -> None:
        reading, copy.reading = copy.reading, None
        if reading is not None:
            try:
                reading.synchronize()
            except DiskTierError:
                copy.drop_buffer()
                for ticket in mates:
                    self._drop_landed(ticket)
                raise

    def _leave(self, copy: HostCopy, mates: Sequence[Ticket]) -> None:
        """Queue the copies to the device. A buffer that was read into has served."""
        buffer = copy.buffer
        assert buffer is not None, "not in host memory"
        before = buffer.last_use
        self._copy_back(mates)
        if copy.offloaded is None:
            copy.drop_buffer()
        else:
            buffer.last_use = both(before, buffer.last_use)

    def _send_ahead(self, copy: HostCopy | None, refs: Sequence[weakref.ref[Ticket]]) -> None:
        """What was read ahead goes on to the device, if anybody still waits for it."""
        mates = [t for ref in refs if (t := ref()) is not None and t.reading]
        if copy is None or not mates:
            return
        if copy.buffer is None:  # served another of its tickets meanwhile
            for ticket in mates:
                self._drop_landed(ticket)
            return
        with suppress(DiskTierError):  # whoever asks for it will hear of it
            self._finish_reading(copy, mates)
            self._leave(copy, mates)

    # Buffers on the way

    def _stage(self, nbytes: int) -> HostBuffer:
        """A buffer nobody uses any more; waits for others to arrive if too many are on the way.

        Raises:
            MemoryError: It would be over the budget, with none on the way.
        """
        while self.staging.statistics().in_use + nbytes > self._max_in_flight_bytes:
            if not self._make_room():
                break
        while True:
            try:
                return finished(self.staging.take(nbytes))
            except MemoryError:
                if not self._make_room():
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


class _Both:
    """Two events that are seen as one by the host."""

    def __init__(self, first: Event, second: Event) -> None:
        self._events = (first, second)

    def query(self) -> bool:
        """Whether both have passed."""
        return all(event.query() for event in self._events)

    def synchronize(self) -> None:
        """Block the host until both have."""
        for event in self._events:
            event.synchronize()


def both(first: Event | None, second: Event | None) -> Event | None:
    """An event that has passed when both have; only the host can wait for it."""
    if first is None or second is None or first is second:
        return second if first is None else first
    return _Both(first, second)


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
