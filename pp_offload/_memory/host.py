"""Host memory for offloaded bytes: slabs from the backend, carved by an arena, kept for reuse.

A step needs the sizes the last one needed, so a buffer that nobody has waits for the next request
of its size: no search, no system allocation. Before new memory is asked for, waiting buffers go
back to the arena, where neighbours become one range again; and where no range is long enough, a
buffer is made of several. So the slabs need not hold more than was live at the peak. A free buffer
is used again even while copies still read it: the next user's copy waits for them.

    loan = memory.allocate(nbytes)  # loan.buffer: to be written when its last_uses have finished
    del loan                        # on any thread; then the buffer is to be had again

NOTE [ Ground truth ]
    An interrupt may come between any two lines. The truth is in the slabs, in the loans that
    somebody refers to, in the buffers that were carved, which know the copies that used them, and
    in the uses of bytes that nobody has. All else is books: the arena, the bins, the counts. A call
    marks them as suspect while it changes them; one that finds the mark, since the last call was
    interrupted, makes them anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from pp_offload._memory.arena import Arena, Range
from pp_offload._memory.bins import FEW, Bins
from pp_offload._memory.budget import HostBudget
from pp_offload._memory.buffers import HostBuffer, Loan
from pp_offload._memory.loans import Loans
from pp_offload._memory.slabs import (
    Allocate,
    Slab,
    SlabSource,
    granule_for,
    powers_of_two,
)
from pp_offload._memory.unfinished import Unfinished, check_finished
from pp_offload._memory.uses import Uses
from pp_offload.backends import Event
from pp_offload.errors import ClosedError

ALIGNMENT = 512
"""Alignment of buffers in a slab, in bytes."""

MAX_SIZES = 256
"""Buffers of so many sizes may wait for the next request of their size."""


@dataclass(frozen=True)
class HostStatistics:
    """What host memory holds. In bytes, but for the counts."""

    in_use: int
    """Bytes in buffers that somebody has."""

    peak: int
    """The most that was ever in use."""

    reserved: int
    """Bytes asked from the system and not returned."""

    num_buffers: int
    """Buffers that somebody has."""

    num_payloads: int
    """Payloads in them."""

    num_allocations: int
    """How often the system was asked."""


class _InUse:
    """What the buffers hold that somebody has, and the most they ever held."""

    def __init__(self, buffers: Iterable[HostBuffer] = (), before: _InUse | None = None) -> None:
        self.nbytes = self.room = self.num_buffers = self.num_payloads = 0
        self.peak: int = 0 if before is None else before.peak
        self.peak_room: int = 0 if before is None else before.peak_room
        for buffer in buffers:
            self.add(buffer)

    def add(self, buffer: HostBuffer) -> None:
        """Somebody has it now."""
        self.nbytes += buffer.nbytes
        self.room += buffer.room_bytes
        self.num_buffers += 1
        self.num_payloads += buffer.num_payloads
        if self.nbytes > self.peak:
            self.peak = self.nbytes
        if self.room > self.peak_room:
            self.peak_room = self.room

    def would_peak_with(self, nbytes: int) -> bool:
        """Whether with a buffer of ``nbytes`` more would be in use than ever."""
        return self.nbytes + nbytes > self.peak or self.room + _room_for(nbytes) > self.peak_room

    def remove(self, buffer: HostBuffer) -> None:
        """Nobody has it any more."""
        self.nbytes -= buffer.nbytes
        self.room -= buffer.room_bytes
        self.num_buffers -= 1
        self.num_payloads -= buffer.num_payloads


class HostMemory:
    """Host memory, bounded by what was live at the peak and not by all sizes ever seen.

    Loans may end on any thread. The rest is for one thread at a time.

    Args:
        allocate: Gives a flat ``uint8`` host tensor of a number of bytes, or raises MemoryError.
        budget: What this process may take; a share of what is available when not given.
        may_split: Whether a buffer may be made of several pieces.
        trim: Has the system take back what was freed, where an allocator would keep it.
    """

    def __init__(
        self,
        allocate: Allocate,
        budget: HostBudget | None = None,
        *,
        may_split: bool = True,
        trim: Callable[[], None] = lambda: None,
    ) -> None:
        self.source = SlabSource(allocate, budget or HostBudget())
        self._may_split = may_split
        self._trim = trim
        # What is there: see NOTE [ Ground truth ]
        self._slabs: list[Slab] = []
        self._loans = Loans[HostBuffer]()
        self._carved: set[HostBuffer] = set()
        self._uses = Uses()
        self._is_closed = False
        # The books
        self._is_suspect = False
        self._arena = Arena(alignment=ALIGNMENT)
        self._bins = Bins()
        self._in_use = _InUse()
        self._compacted_to = 0

    def allocate(self, nbytes: int, num_payloads: int = 1, *, force: bool = False) -> Loan:
        """A buffer of ``nbytes``; wait for its ``last_uses`` before writing.

        Args:
            nbytes: At least one.
            num_payloads: How many payloads share it; only counted.
            force: Take it even over the budget, for bytes that must come back; in one piece.

        Returns:
            It is taken for as long as anybody refers to this object.

        Raises:
            MemoryError: It would be over the budget, or the host has no more to give.
            Unfinished: To make room, slabs must go that copies still use. Nothing was begun.
            ClosedError: It was closed.
        """
        if self._is_closed:
            raise ClosedError("the host tier is closed; make a new manager to go on")
        if self._is_suspect or self._loans.has_ended:
            self._settle_for(nbytes)
        self._is_suspect = True
        try:
            buffer = self._bins.pop(nbytes) or self._carve(nbytes, force)
        except (MemoryError, Unfinished):
            self._is_suspect = False  # nothing was begun
            raise
        buffer.num_payloads = num_payloads
        loan = Loan(buffer)
        self._loans.add(loan, buffer)
        self._in_use.add(buffer)
        self._is_suspect = False
        return loan

    def compact(self) -> None:
        """Between steps: have the fewest and largest slabs that hold the peak so far.

        Does nothing while a buffer is in use, or if nothing changed since the last time. Never asks
        for more than there is; if the system has less than before, fewer slabs are left. Where
        buffers may not be split, the slabs stay as they are.

        Raises:
            Unfinished: Copies still use the slabs.
        """
        peak = self._in_use.peak_room
        if not self._may_split or self._is_closed or peak == self._compacted_to:
            return
        self._settle()
        if self._in_use.num_buffers:
            return
        sizes = list(powers_of_two(peak, granule_for(peak)))
        if sum(sizes) <= self._reserved_bytes():
            check_finished(self._last_uses())
            self._is_suspect = True
            with suppress(MemoryError):
                self._replace_slabs(sizes)
            self._is_suspect = False
        self._compacted_to = peak

    def release_idle(self) -> None:
        """Give all slabs back to the system, unless a buffer is in use.

        Raises:
            Unfinished: Copies still use them.
        """
        self._settle()
        if not self._in_use.num_buffers:
            check_finished(self._last_uses())
        self._is_suspect = True
        self._drop_slabs()
        self._is_suspect = False

    def bytes_in_use(self) -> int:
        """Exact at the call; of :meth:`statistics`, this alone."""
        self._settle()
        return self._in_use.nbytes

    def statistics(self) -> HostStatistics:
        """Exact at the call."""
        self._settle()
        in_use = self._in_use
        return HostStatistics(
            in_use.nbytes,
            in_use.peak,
            self._reserved_bytes(),
            in_use.num_buffers,
            in_use.num_payloads,
            self.source.num_allocations,
        )

    def count_in(self, budget: HostBudget) -> None:
        """Have its slabs count in a budget as well, which knows of none where this was copied."""
        for slab in self._slabs:
            slab.reserved = budget.reserve(slab.nbytes, force=True)

    def close(self) -> None:
        """Drop all memory that no buffer in use needs, once the copies that use it are done."""
        self._is_closed = True
        self._wait_for_copies()
        self._is_suspect = True  # the books are of slabs that are gone
        self._carved = set(self._loans.audit())
        self._slabs = []
        self._settle()

    def __del__(self) -> None:
        with suppress(Exception):
            self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        for event in self._last_uses():
            with suppress(Exception):  # a copy that failed is done as well
                event.synchronize()

    def _last_uses(self) -> Iterator[Event]:
        """Events that must end before memory is freed, for the system may give it to anybody."""
        return chain(self._uses.events(), *(buffer.last_uses() for buffer in self._carved))

    # The books

    def _settle_for(self, nbytes: int) -> None:
        """Take back some of what nobody has any more, so that no request pays for a whole step's.

        All of it, if there is no buffer of ``nbytes`` else, or the peak would count it as in use.
        """
        self._settle(FEW)
        if self._loans.has_ended:
            if not self._bins.has(nbytes) or self._in_use.would_peak_with(nbytes):
                self._settle()

    def _settle(self, most: int | None = None) -> None:
        """Take back what nobody has any more; first make the books anew if need be."""
        if self._is_suspect:
            self._make_books()
        self._is_suspect = True
        for buffer in self._loans.ended(most):
            self._in_use.remove(buffer)
            self._bins.add(buffer)
        while self._bins.num_sizes > MAX_SIZES and not self._is_closed:
            self._free(self._bins.longest_unused()[:1])
        self._is_suspect = False

    def _make_books(self) -> None:
        """Make the books from what is there."""
        live = self._loans.audit()
        self._uses.mend()
        for buffer in self._carved.difference(live):
            self._note_uses(buffer)
        self._carved = set(live)
        ranges = [] if self._is_closed else [one for buffer in live for one in buffer.ranges]
        self._arena = Arena.of([slab.nbytes for slab in self._slabs], ranges, ALIGNMENT)
        self._bins = Bins()
        self._in_use = _InUse(live, self._in_use)

    def _note_uses(self, buffer: HostBuffer) -> None:
        """Keep the unfinished uses of a buffer's bytes, for those that get these bytes next.

        To be called before the buffer is forgotten, or an interrupt might lose some.
        """
        left = tuple(event for event in buffer.last_uses() if not event.query())
        if left:
            for one in buffer.ranges:
                self._uses.set(one, left)

    def _free(self, buffers: list[HostBuffer]) -> None:
        """Give the ranges of waiting buffers to the arena."""
        for buffer in buffers:
            self._note_uses(buffer)
            self._bins.remove(buffer)
            self._carved.discard(buffer)
            for one in buffer.ranges:
                self._arena.free(one)

    # The books are out of order inside what follows

    def _carve(self, nbytes: int, force: bool) -> HostBuffer:
        buffer = HostBuffer(nbytes, self._ranges(nbytes, force), self._slabs)
        if not self._uses:
            self._carved.add(buffer)
            return buffer
        buffer.before = self._uses.unfinished(buffer.ranges)
        self._carved.add(buffer)
        for one in buffer.ranges:  # last, or an interrupt would leave uses that nobody knows
            self._uses.clear(one)
        return buffer

    def _ranges(self, nbytes: int, force: bool) -> list[Range]:
        room = _room_for(nbytes)
        for make_room in (None, self._free_idle, self._free_busy):
            if make_room is not None:
                make_room(room)
            found = self._arena.allocate(nbytes)
            if found is not None:
                return [found]
            if self._may_split and make_room is not None and self._arena.free_bytes >= room:
                return self._in_pieces(nbytes)
        if force or not self._may_split:
            self._drop_slabs()  # nothing there is long enough
            self._add(self.source.acquire_whole(nbytes, force=force))
            whole = self._arena.allocate(nbytes)
            assert whole is not None
            return [whole]
        self._grow(room - self._arena.free_bytes)
        return self._in_pieces(nbytes)

    def _in_pieces(self, nbytes: int) -> list[Range]:
        """The longest free ranges, until they hold ``nbytes`` together."""
        ranges: list[Range] = []
        while nbytes > 0:
            found = self._arena.allocate(min(nbytes, self._arena.largest_free_bytes))
            assert found is not None
            ranges.append(found)
            nbytes -= found.nbytes
        return ranges

    def _free_idle(self, room: int) -> None:
        """Free buffers whose last use has finished, until there is room; see :data:`FEW`.

        Where none of the longest unused has finished, the others are not looked at: what was given
        back after them is hardly done before.
        """
        while self._arena.largest_free_bytes < room:
            few = self._bins.longest_unused()
            idle = [buffer for buffer in few if buffer.is_idle()]
            if not idle:
                return
            self._free(idle)

    def _free_busy(self, room: int) -> None:
        """Free buffers that copies still use as well; new buffers wait for these copies."""
        while self._arena.largest_free_bytes < room and (few := self._bins.longest_unused()):
            self._free(few)

    def _grow(self, nbytes: int) -> None:
        granule = granule_for(self._reserved_bytes() + nbytes)
        if -(-nbytes // granule) * granule > self.source.budget.left_bytes:
            granule = ALIGNMENT
        for slab in self.source.acquire(nbytes, granule):
            self._add(slab)

    def _drop_slabs(self) -> None:
        if not self._in_use.num_buffers:
            check_finished(self._last_uses())
            self._keep([])
            self._compacted_to = 0
            self._trim()

    def _replace_slabs(self, sizes: list[int]) -> None:
        """Have slabs of exactly these sizes; those there are that have one of them stay."""
        kept, missing = _among(self._slabs, sizes)
        self._keep(kept)
        self._trim()
        for size in missing:
            for slab in self.source.acquire(size, size):
                self._add(slab)

    def _keep(self, slabs: list[Slab]) -> None:
        """Drop all slabs but these. Nobody has a buffer, and all copies are done."""
        self._carved, self._uses, self._slabs = set(), Uses(), slabs
        self._bins = Bins()
        self._arena = Arena.of([slab.nbytes for slab in slabs], (), ALIGNMENT)

    def _reserved_bytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def _add(self, slab: Slab) -> None:
        self._slabs.append(slab)
        self._arena.add_slab(slab.nbytes)


def _room_for(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _among(slabs: list[Slab], sizes: list[int]) -> tuple[list[Slab], list[int]]:
    """Slabs of these sizes, the newest first, and the sizes that none of them has."""
    missing = Counter(sizes)
    found = []
    for slab in reversed(slabs):
        if missing[slab.nbytes] > 0:
            missing[slab.nbytes] -= 1
            found.append(slab)
    return found, list(missing.elements())
