"""The disk tier behind a device: bytes pass through staging buffers in host memory.

    ON_HOST    d2h copies into the buffer
    WRITING    a thread writes the buffer to the extent
    ON_DISK    the extent alone
    READING    a thread reads the extent into another buffer, once that is free
    READ       h2d copies it to the device; then the extent alone again

A payload that is needed before it is on disk alone comes from its buffer. What could not be written
stays in its buffer. Nothing here waits: a call that needs bytes or a buffer that are still on their
way raises ``Unfinished``.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import cast

from pp_offload._memory.buffers import HostBuffer, Loan
from pp_offload._memory.disk import DiskEvent, DiskExtent, DiskFile
from pp_offload._memory.host import HostMemory
from pp_offload._memory.unfinished import Unfinished, check_finished
from pp_offload._transfer.block import Block, BlockState
from pp_offload._transfer.copies import Copies
from pp_offload._transfer.on_disk import DiskBlock, OnDisk
from pp_offload._transfer.ticket import Ticket, place
from pp_offload._transfer.tier import TierStatistics
from pp_offload.backends import Event
from pp_offload.errors import DiskTierError

Queue = deque[weakref.ref[DiskBlock]]
"""Blocks on their way, the furthest first."""


IN_BUFFER = (BlockState.ON_HOST, BlockState.WRITING, BlockState.REFUSED)
"""Where a copy to the device may begin at once, behind the one to the host."""


class StagedDisk(OnDisk):
    """Brings bytes of a device to disk, and back.

    Args:
        copies, disk: As for :class:`OnDisk`.
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
        """Write what has arrived, drop buffers of what is on disk, send on what was read ahead."""
        self._move_on(self._arriving, _has_arrived, self._write)
        self._move_on(self._writing, _was_written, self._drop_buffer)
        self._move_on(self._read_ahead, _was_read, self._send_ahead)

    @staticmethod
    def _move_on(
        queue: Queue, has_ended: Callable[[DiskBlock], bool], act: Callable[[DiskBlock], None]
    ) -> None:
        """Act on the first blocks of a queue, as far as they have come; skip those that are gone.

        A block leaves the queue only afterwards, or an interrupt would have it forgotten. So
        ``act`` may be called twice for one.
        """
        while queue:
            ref = queue[0]
            block = ref()
            if block is not None:
                if not has_ended(block):
                    return
                act(block)
            if queue and queue[0] is ref:  # another thread may have been faster
                queue.popleft()

    # To the disk

    def allocate(self, batch: list[Ticket], nbytes: int) -> list[Block]:
        """One extent and one staging buffer for the batch.

        Raises:
            MemoryError: The disk failed in this step, or there is no room for a staging buffer.
            Unfinished: Too much is on its way.
        """
        self.check_disk()
        loan = self._stage(nbytes)
        uses = unfinished_uses(loan.buffer)
        check_finished(event for event in uses if isinstance(event, DiskEvent))
        # A stream cannot wait for a thread, but check_finished has seen all threads end.
        copies = tuple(event for event in uses if not isinstance(event, DiskEvent))
        loan.buffer.before, loan.buffer.last_use = copies, None
        return [self._block(batch, self.disk.allocate(nbytes, len(batch)), loan)]

    def _block(self, batch: list[Ticket], extent: DiskExtent, loan: Loan) -> Block:
        return place(batch, DiskBlock(self, extent, loan))

    def store(self, tickets: Sequence[Ticket], blocks: Sequence[Block]) -> int:
        """Copy tickets into the staging buffer; :meth:`poll` then has it written to disk."""
        nbytes = self._copies.copy_to_host(tickets, blocks)
        self._arriving += [weakref.ref(cast(DiskBlock, one)) for one in blocks]
        self._copies.poll()
        self.poll()
        return nbytes

    def _write(self, block: DiskBlock) -> None:
        """Have a thread write the bytes, which have arrived in the buffer."""
        buffer = block.buffer
        if block.state is not BlockState.ON_HOST or buffer is None:
            return
        if not block.extent.was_sent:
            written = DiskEvent()
            buffer.before += (written,)  # first, or its next user might not wait for the thread
            self.disk.write(block.extent, buffer.pieces[0], written)
        self._writing.append(weakref.ref(block))
        block.move_to(BlockState.WRITING)

    def _drop_buffer(self, block: DiskBlock) -> None:
        """The write has ended: drop the buffer, or the extent if it failed."""
        self.note_written(block)
        if block.state is BlockState.ON_DISK:
            block.loan = None

    # Back from it

    def load(self, tickets: Sequence[Ticket], *, is_ahead: bool) -> int:
        """Bring payloads to the device; threads first read those that are on disk alone.

        Ahead of use, all payloads of an extent come together, and an extent for which no staging
        buffer is free is left until it is needed.
        """
        left = [ticket for ticket in tickets if ticket.device_tensor is None]
        return self._load_ahead(left) if is_ahead else sum(map(self._load_now, left))

    def _load_ahead(self, tickets: Sequence[Ticket]) -> int:
        here = [ticket for ticket in tickets if ticket.block.state in IN_BUFFER]
        num = self._copies.copy_to_device(here) if here else 0
        for block, asked in by_block([one for one in tickets if one.reload is None]).items():
            if block.state is BlockState.READ:  # an interrupt kept it from being sent on
                num += self._send(block, asked)
            elif block.state is BlockState.ON_DISK:
                try:
                    loan = self._stage(block.extent.nbytes)
                except (MemoryError, Unfinished):
                    continue
                self._begin_to_read(block, loan)
                self._read_ahead.append(weakref.ref(block))
                expected = self._all_of(block, asked)
                self._copies.reloads.expect(expected)
                num += len(expected)
        return num

    def _load_now(self, ticket: Ticket) -> int:
        block = DiskBlock.of(ticket)
        if block.state in IN_BUFFER:
            return self._copies.copy_to_device([ticket])
        if block.state is BlockState.ON_DISK:
            try:
                loan = self._stage(block.extent.nbytes)
            except MemoryError:
                loan = self.staging.allocate(block.extent.nbytes, force=True)
            self._begin_to_read(block, loan)
        self._finish_reading(block)
        return self._send(block, [ticket])

    def _begin_to_read(self, block: DiskBlock, loan: Loan) -> None:
        """Have a thread read what is on disk."""
        buffer = loan.buffer
        buffer.before = unfinished_uses(buffer)  # first, or an interrupt would have them forgotten
        reading = buffer.last_use = DiskEvent()
        self.disk.read(block.extent, buffer.pieces[0], reading, after=buffer.before)
        block.offloaded, block.reading, block.loan = None, reading, loan
        block.move_to(BlockState.READING)  # last: what an interrupt cuts off here is read again

    def _finish_reading(self, block: DiskBlock) -> None:
        buffer = block.buffer
        if block.state is not BlockState.READING or buffer is None:
            return
        check_finished((block.reading,))
        try:
            block.reading.synchronize()
        except DiskTierError:
            block.move_to(BlockState.ON_DISK)
            block.loan = None
            self._copies.give_up(self._all_of(block, ()))
            raise
        check_finished(buffer.before)  # they ended before it, but only a thread was told
        buffer.before = ()
        block.move_to(BlockState.READ)

    def _send(self, block: DiskBlock, asked: Sequence[Ticket]) -> int:
        """Queue copies to the device, for all who wait, then drop the buffer."""
        num = self._copies.copy_to_device(self._all_of(block, asked))
        block.move_to(BlockState.ON_DISK)
        block.loan = None
        return num

    def _all_of(self, block: Block, asked: Sequence[Ticket]) -> list[Ticket]:
        """``asked``, and all other tickets of ``block`` that are to be used and not brought yet."""
        refs = chain(block.tickets, *block.shared.values())
        mates = [one for ref in refs if (one := ref()) is not None]
        more = [one for one in mates if one.num_waiting > 0 and one.device_tensor is None]
        return list(dict.fromkeys([*asked, *more]))

    def _send_ahead(self, block: DiskBlock) -> None:
        """Copy what was read ahead to the device, unless a load on demand has done so."""
        with suppress(DiskTierError):  # whoever asks for it gets the error
            self._finish_reading(block)
            if block.state is BlockState.READ:  # also where an interrupt came behind the read
                self._send(block, ())

    # Buffers on the way

    def _stage(self, nbytes: int) -> Loan:
        """A staging buffer, which earlier copies and threads may still use.

        Raises:
            MemoryError: It would be over the budget, and no buffer is on its way to the disk.
            Unfinished: Too many are on their way. It names the event of the furthest.
        """
        if self.staging.statistics().in_use + nbytes > self._copies.in_flight.bound.nbytes:
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
        writes = [block.extent.last_use for block in _living(self._writing)]
        copies = [block.offloaded for block in _living(self._arriving)]
        for event in (*writes, *copies):
            if event is not None:
                raise Unfinished((event,))

    # Numbers and memory

    def statistics(self) -> TierStatistics:
        return replace(super().statistics(), host=self.staging.statistics())

    def compact(self) -> None:
        super().compact()
        self.staging.compact()

    def release_idle(self) -> None:
        self.staging.release_idle()

    def close(self) -> None:
        self.staging.close()
        super().close()


def _living(queue: Queue) -> list[DiskBlock]:
    return [block for ref in queue if (block := ref()) is not None]


def unfinished_uses(buffer: HostBuffer) -> tuple[Event, ...]:
    """Events of copies and threads that still use ``buffer``."""
    return tuple(event for event in buffer.last_uses() if not event.query())


def by_block(tickets: Sequence[Ticket]) -> dict[DiskBlock, list[Ticket]]:
    """Tickets by the block that holds their bytes, in order."""
    groups: dict[DiskBlock, list[Ticket]] = {}
    for ticket in tickets:
        groups.setdefault(DiskBlock.of(ticket), []).append(ticket)
    return groups


def _has_arrived(block: DiskBlock) -> bool:
    return block.offloaded is None or block.offloaded.query()


def _was_written(block: DiskBlock) -> bool:
    extent, is_done = block.extent, block.state is not BlockState.WRITING
    return is_done or extent.checksum is not None or extent.failure is not None


def _was_read(block: DiskBlock) -> bool:
    return block.state is not BlockState.READING or block.reading.query()
