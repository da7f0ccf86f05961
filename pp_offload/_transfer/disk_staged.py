"""The disk tier behind a device: bytes pass through staging buffers in host memory.

    on the way    arriving    d2h copies into the buffer
                  writing     a thread writes the buffer to the extent
    at rest                   the extent alone
    on the way    reading     a thread reads the extent into another buffer, once that is free
                  leaving     h2d copies it to the device; then the extent alone again

A payload that is needed before it is at rest comes from its buffer. What could not be written stays
in its buffer. Nothing here waits: a call that needs bytes or a buffer that are still on their way
raises ``Unfinished``.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain

from pp_offload._memory.buffers import HostBuffer, Loan
from pp_offload._memory.disk import DiskEvent, DiskFile
from pp_offload._memory.host import HostMemory
from pp_offload._memory.unfinished import Unfinished, check_finished
from pp_offload._transfer.copies import Copies
from pp_offload._transfer.on_disk import OnDisk
from pp_offload._transfer.ticket import HostCopy, Ticket, place
from pp_offload._transfer.tier import TierStatistics
from pp_offload.backends import Event
from pp_offload.errors import DiskTierError

Queue = deque[weakref.ref[HostCopy]]
"""Copies on their way, the furthest first."""


class StagedDisk(OnDisk):
    """Brings bytes of a device to disk, and back.

    Args:
        copies: Queues the copies between device and staging buffers.
        disk: Where the bytes go.
        staging: Host memory that the bytes pass through, each buffer in one piece.
    """

    def __init__(self, copies: Copies, disk: DiskFile, staging: HostMemory) -> None:
        super().__init__(copies, disk)
        self.staging = staging
        self._arriving: Queue = deque()
        self._writing: Queue = deque()
        self._read_ahead: Queue = deque()

    @property
    def is_bringing(self) -> bool:
        """Whether something is read ahead."""
        return bool(self._read_ahead)

    def poll(self) -> None:
        """Write what has arrived, drop buffers of what is on disk, send on what was read ahead.

        Never blocks.
        """
        while self._arriving and _has_arrived(self._arriving[0]()):
            self._next(self._arriving, self._write)
        while self._writing and _is_written(self._writing[0]()):
            self._next(self._writing, self._settle)
        while self._read_ahead and _was_read(self._read_ahead[0]()):
            self._send_ahead(self._read_ahead.popleft()())

    @staticmethod
    def _next(queue: Queue, act: Callable[[HostCopy], None]) -> None:
        """Act on the first copy of a queue, unless it is gone.

        It leaves the queue only afterwards, or an interrupt would have it forgotten. So ``act`` may
        be called twice for one copy.
        """
        ref = queue[0]
        copy = ref()
        if copy is not None:
            act(copy)
        if queue and queue[0] is ref:  # another thread may have been faster
            queue.popleft()

    # To the disk

    def allocate(self, batch: list[Ticket], nbytes: int) -> list[HostCopy]:
        """One extent and one staging buffer for the batch.

        Raises:
            MemoryError: The disk failed in this step, or there is no room for a staging buffer.
            Unfinished: Too much is on its way.
        """
        self._failures.check()
        loan = self._stage(nbytes)
        uses = unfinished_uses(loan.buffer)
        check_finished(event for event in uses if isinstance(event, DiskEvent))
        # A stream cannot wait for a thread, but check_finished has seen all threads end.
        copies = tuple(event for event in uses if not isinstance(event, DiskEvent))
        loan.buffer.before, loan.buffer.last_use = copies, None
        return [place(batch, HostCopy(self, loan, self.disk.allocate(nbytes, len(batch))))]

    def store(self, tickets: Sequence[Ticket], copies: Sequence[HostCopy]) -> int:
        """Copy tickets into the staging buffer; :meth:`poll` then has it written to disk."""
        nbytes = self._copies.copy_to_host(tickets, copies)
        self._arriving += map(weakref.ref, copies)
        self._copies.poll()
        self.poll()
        return nbytes

    def _write(self, copy: HostCopy) -> None:
        """Have a thread write the bytes, which have arrived in the buffer."""
        extent, buffer = copy.extent, copy.buffer
        if buffer is None or extent is None:
            return
        if not extent.was_sent:
            written = DiskEvent()
            buffer.before += (written,)  # first, or its next user might not wait for the thread
            self.disk.write(extent, buffer.pieces[0], written)
        self._writing.append(weakref.ref(copy))

    def _settle(self, copy: HostCopy) -> None:
        """The write has ended: drop the buffer, or the extent if it failed."""
        if copy.extent is None or copy.offloaded is None:  # it was settled, and is being read
            return
        if copy.extent.failure is None:
            copy.drop_buffer()
        else:
            self._failures.note(copy.extent.failure)
            copy.drop_extent()

    # Back from it

    def load(self, tickets: Sequence[Ticket], *, is_ahead: bool) -> int:
        """Bring payloads to the device; threads first read those that are on disk alone.

        Ahead of use, all payloads of an extent come together, and an extent for which no staging
        buffer is free is left until it is needed.

        Raises:
            DiskTierError: A payload that is needed now cannot be read.
            Unfinished: It is still being read, or there is no buffer for it yet.
        """
        left = [ticket for ticket in tickets if ticket.device_tensor is None]
        return self._load_ahead(left) if is_ahead else sum(map(self._load_now, left))

    def _load_ahead(self, tickets: Sequence[Ticket]) -> int:
        here = [ticket for ticket in tickets if _is_here(ticket.copy)]
        num = self._copies.copy_to_device(here) if here else 0
        for copy, asked in by_copy([ticket for ticket in tickets if not ticket.is_coming]).items():
            if _was_left(copy):
                num += self._leave(copy, asked)
            elif copy.buffer is None and self._begin_to_read(copy, is_ahead=True):
                self._read_ahead.append(weakref.ref(copy))
                expected = self._all_of(copy, asked)
                self._copies.reloads.expect(expected)
                num += len(expected)
        return num

    def _load_now(self, ticket: Ticket) -> int:
        copy = ticket.copy
        if copy.extent is None or _is_here(copy):
            return self._copies.copy_to_device([ticket])
        if copy.buffer is None:
            self._begin_to_read(copy, is_ahead=False)
        self._finish_reading(copy)
        return self._leave(copy, [ticket])

    def _begin_to_read(self, copy: HostCopy, *, is_ahead: bool) -> bool:
        """Have a thread read a copy at rest. False if it is ahead of use and has no buffer."""
        extent = copy.extent
        assert extent is not None, "not on disk"
        try:
            loan = self._stage(extent.nbytes)
        except (MemoryError, Unfinished) as failure:
            if is_ahead:
                return False
            if isinstance(failure, Unfinished):
                raise
            loan = self.staging.allocate(extent.nbytes, force=True)
        buffer = loan.buffer
        buffer.before = unfinished_uses(buffer)  # first, or an interrupt would have them forgotten
        reading = buffer.last_use = DiskEvent()
        self.disk.read(extent, buffer.pieces[0], reading, after=buffer.before)
        # In one statement: a buffer without ``reading`` would be taken for one that holds the bytes
        copy.offloaded, copy.reading, copy.loan = None, reading, loan
        return True

    def _finish_reading(self, copy: HostCopy) -> None:
        reading, loan = copy.reading, copy.loan
        if reading is None or loan is None:
            return
        check_finished((reading,))
        try:
            reading.synchronize()
        except DiskTierError:
            copy.reading = copy.loan = None
            self._copies.give_up(self._all_of(copy, ()))
            raise
        check_finished(loan.buffer.before)  # they ended before it, but only a thread was told
        loan.buffer.before = ()
        copy.reading = None

    def _leave(self, copy: HostCopy, asked: Sequence[Ticket]) -> int:
        """Queue copies to the device; from a buffer read into, for all who wait, then drop it."""
        if copy.offloaded is not None:
            return self._copies.copy_to_device(asked)
        num = self._copies.copy_to_device(self._all_of(copy, asked))
        copy.drop_buffer()
        return num

    def _all_of(self, copy: HostCopy, asked: Sequence[Ticket]) -> list[Ticket]:
        """``asked``, and all other tickets of ``copy`` that are to be used and not brought yet."""
        refs = chain(copy.tickets, *copy.shared.values())
        mates = {ticket: None for ref in refs if (ticket := ref()) is not None}
        more = [
            t for t in mates if t.num_waiting > 0 and t.device_tensor is None and t not in asked
        ]
        return [*asked, *more]

    def _send_ahead(self, copy: HostCopy | None) -> None:
        """Copy what was read ahead to the device, unless a load on demand has done so.

        If an interrupt has it forgotten on the way, the next load copies it.
        """
        if copy is not None and copy.reading is not None:
            with suppress(DiskTierError):  # whoever asks for it gets the error
                self._finish_reading(copy)
                self._leave(copy, ())

    # Buffers on the way

    def _stage(self, nbytes: int) -> Loan:
        """A staging buffer, which earlier copies and threads may still use.

        Raises:
            MemoryError: It would be over the budget, and no buffer is on its way to the disk.
            Unfinished: Too many are on their way. It names the event of the furthest.
        """
        if self.staging.statistics().in_use + nbytes > self._copies.in_flight.max_bytes:
            self._let_the_furthest_pass()
        try:
            return self.staging.allocate(nbytes)
        except MemoryError:
            self._let_the_furthest_pass()
            raise

    def _let_the_furthest_pass(self) -> None:
        """Raise ``Unfinished`` if a buffer is on its way to the disk.

        Also if its event has just ended: the next :meth:`poll` moves it on, which makes room.
        """
        for ref in self._writing:
            copy = ref()
            if copy is not None and copy.extent is not None and copy.extent.last_use is not None:
                raise Unfinished((copy.extent.last_use,))
        for ref in self._arriving:
            copy = ref()
            if copy is not None and copy.offloaded is not None:
                raise Unfinished((copy.offloaded,))

    # Numbers and memory

    def statistics(self) -> TierStatistics:
        """The numbers of the disk and of the staging memory."""
        staging = self.staging.statistics()
        return replace(
            super().statistics(),
            host_bytes_in_use=staging.in_use,
            host_bytes_peak=staging.peak,
            host_bytes_reserved=staging.reserved,
            host_allocations=staging.num_allocations,
        )

    def compact(self) -> None:
        """Have the next step try the disk again, and make staging memory tight."""
        super().compact()
        self.staging.compact()

    def release_idle(self) -> None:
        """Give staging memory back to the system, unless a buffer is in use."""
        self.staging.release_idle()

    def close(self) -> None:
        """Drop staging memory and file."""
        self.staging.close()
        super().close()


def unfinished_uses(buffer: HostBuffer) -> tuple[Event, ...]:
    """Events of copies and threads that still use ``buffer``."""
    return tuple(event for event in buffer.last_uses() if not event.query())


def by_copy(tickets: Sequence[Ticket]) -> dict[HostCopy, list[Ticket]]:
    """Tickets by the copy that holds their bytes, in order."""
    groups: dict[HostCopy, list[Ticket]] = {}
    for ticket in tickets:
        groups.setdefault(ticket.copy, []).append(ticket)
    return groups


def _has_arrived(copy: HostCopy | None) -> bool:
    return copy is None or copy.offloaded is None or copy.offloaded.query()


def _is_written(copy: HostCopy | None) -> bool:
    extent = None if copy is None else copy.extent
    return extent is None or extent.checksum is not None or extent.failure is not None


def _is_here(copy: HostCopy) -> bool:
    return copy.loan is not None and copy.offloaded is not None


def _was_left(copy: HostCopy) -> bool:
    """Whether it was read, and an interrupt kept it from being sent on."""
    return copy.loan is not None and copy.offloaded is None and copy.reading is None


def _was_read(copy: HostCopy | None) -> bool:
    return copy is None or copy.reading is None or copy.reading.query()
