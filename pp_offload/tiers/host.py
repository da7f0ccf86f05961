"""Host memory for offloaded bytes: slabs from the backend, carved by an arena, kept for reuse.

A step needs the sizes the last one needed, so a freed buffer waits in a bin of its size and the
next request of that size takes it: no search, no system allocation. Before new memory is asked for,
the bins go back to the arena, where neighbours become one range again; and where no range is long
enough, a buffer is made of several. So the slabs need not hold more than was live at the peak.
Not even copies that still read what was freed make it ask: the next user's copy waits for them.

    buffer = tier.take(nbytes)   # its last_uses must have finished before it is written
    tier.give(buffer)            # from any thread, also from a destructor
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from pp_offload.backends import Event
from pp_offload.errors import ClosedError
from pp_offload.tiers.arena import Arena, Range
from pp_offload.tiers.budget import HostBudget
from pp_offload.tiers.slabs import (
    Allocate,
    Slab,
    SlabSource,
    granule_for,
    powers_of_two,
)

ALIGNMENT = 512
"""Of buffers in a slab. In bytes."""

PART_ALIGNMENT = 64
"""Of parts in a buffer. In bytes."""

Part = tuple[torch.Size, torch.dtype]
"""A contiguous tensor that a buffer is to hold."""

Place = tuple[int, Tensor]
"""Its first byte in the buffer, and the tensor there."""


class HostBuffer:
    """Host memory in one piece or several, and the copies that used it last.

    Attributes:
        last_use: By a stream.
        before: Other uses of the same memory until something waited for them: what was under way
            when it was carved, and a thread that writes it to disk.
    """

    __slots__ = (
        "_parts",
        "_slabs",
        "_places",
        "before",
        "last_use",
        "nbytes",
        "num_parts",
        "pieces",
        "ranges",
        "room_bytes",
    )

    def __init__(self, nbytes: int, ranges: list[Range], slabs: list[Slab]) -> None:
        self.nbytes = nbytes
        self.num_parts = 1
        self.ranges = ranges
        self.room_bytes = sum(one.nbytes for one in ranges)
        self.pieces: list[Tensor] = []
        self.last_use: Event | None = None
        self.before: tuple[Event, ...] = ()
        self._slabs = [slabs[one.slab] for one in ranges]
        left = nbytes
        for one, slab in zip(ranges, self._slabs, strict=True):
            self.pieces.append(slab.data[one.offset : one.offset + min(left, one.nbytes)])
            left -= one.nbytes
        self._parts: list[Part] = []
        self._places: list[Place] = []

    def last_uses(self) -> Iterator[Event]:
        """What must have finished before the memory is written."""
        yield from self.before
        if self.last_use is not None:
            yield self.last_use

    def shaped(self, parts: list[Part]) -> list[Place]:
        """Where contiguous tensors lie, one behind the other. Made once for the same parts.

        One that a single piece does not hold is a tensor without bytes, on the ``meta`` device.
        """
        if self._parts != parts:
            self._parts, self._places = parts, []
            begin = 0
            for size, dtype in parts:
                nbytes = size.numel() * dtype.itemsize
                held = self.part(begin, nbytes)
                if len(held) == 1:
                    self._places.append((begin, held[0].view(dtype).view(size)))
                else:
                    self._places.append((begin, torch.empty(size, dtype=dtype, device="meta")))
                begin += room_for(nbytes)
        return self._places

    def part(self, begin: int, nbytes: int) -> list[Tensor]:
        """The ``nbytes`` from byte ``begin`` on, as flat ``uint8`` tensors."""
        held: list[Tensor] = []
        for piece in self.pieces:
            if begin < piece.numel() and nbytes > 0:
                held.append(piece[begin : begin + nbytes])
                nbytes -= held[-1].numel()
            begin = max(0, begin - piece.numel())
        return held


def room_for(nbytes: int) -> int:
    """What a part of ``nbytes`` takes of a buffer that holds several."""
    return -(-nbytes // PART_ALIGNMENT) * PART_ALIGNMENT


@dataclass(frozen=True)
class HostStatistics:
    """What a host tier holds. In bytes, but for the counts."""

    in_use: int
    """In buffers that were taken and not given back."""

    peak: int
    """The most that was ever in use."""

    reserved: int
    """Asked from the system and not returned."""

    num_buffers: int
    """Buffers that were taken and not given back."""

    num_parts: int
    """Payloads in them."""

    num_allocations: int
    """How often the system was asked."""


class HostTier:
    """Bounded by what was live at the peak, not by all sizes ever seen.

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
        self._slabs: list[Slab] = []
        self._arena = Arena(alignment=ALIGNMENT)
        self._bins: defaultdict[int, list[HostBuffer]] = defaultdict(list)
        self._returned: deque[HostBuffer] = deque()
        self._in_use = self._peak = self._num_taken = self._num_parts = 0
        self._room = self._peak_room = self._fitted_to = 0
        self._unfinished: list[Event] = []
        self._is_closed = False

    def take(self, nbytes: int, num_parts: int = 1, *, force: bool = False) -> HostBuffer:
        """A buffer of ``nbytes``; wait for its ``last_uses`` before writing.

        Args:
            nbytes: At least one.
            num_parts: How many payloads share it; only counted.
            force: Take it also over the budget, for bytes that must come back; in one piece.

        Raises:
            MemoryError: It would be over the budget, or the host has no more to give.
            ClosedError: The tier was closed.
        """
        if self._is_closed:
            raise ClosedError("the host tier is closed; make a new manager to go on")
        if self._returned:
            self._collect()
        ready = self._bins.get(nbytes)
        buffer = ready.pop() if ready else self._carve(nbytes, force)
        self._in_use += nbytes
        self._room += buffer.room_bytes
        self._num_taken += 1
        self._num_parts += num_parts
        buffer.num_parts = num_parts
        if self._in_use > self._peak:
            self._peak = self._in_use
        if self._room > self._peak_room:
            self._peak_room = self._room
        return buffer

    def give(self, buffer: HostBuffer) -> None:
        """Hand a buffer back. Safe in a destructor: it is only noted, and filed later."""
        self._returned.append(buffer)

    def fit(self) -> None:
        """Between steps: make the slabs as few and as large as hold the peak so far.

        Does nothing while a buffer is in use, or if nothing changed since the last time; else it
        waits for the copies under way. Never asks for more than there is; if the system has less
        than before, fewer slabs are left. A tier of whole pieces keeps the slabs it has.
        """
        self._collect()
        if not self._may_split:
            return
        if self._num_taken or self._is_closed or self._peak_room == self._fitted_to:
            return
        self._fitted_to = self._peak_room
        sizes = list(powers_of_two(self._peak_room, granule_for(self._peak_room)))
        if sum(sizes) <= self._reserved_bytes():
            self._wait_for_copies()
            self._unfinished.clear()
            self._bins.clear()
            with suppress(MemoryError):
                self._rebuild(sizes)

    def release_idle(self) -> None:
        """Give all slabs back to the system, unless a buffer is in use; waits for copies."""
        self._collect()
        if not self._num_taken:
            self._wait_for_copies()
            self._unfinished.clear()
            self._bins.clear()
            self._slabs.clear()
            self._arena = Arena(alignment=ALIGNMENT)
            self._fitted_to = 0
            self._trim()

    def statistics(self) -> HostStatistics:
        """Exact at the call."""
        self._collect()
        return HostStatistics(
            self._in_use,
            self._peak,
            self._reserved_bytes(),
            self._num_taken,
            self._num_parts,
            self.source.num_allocations,
        )

    def close(self) -> None:
        """Drop all memory that no buffer in use needs, once the copies that use it are done."""
        self._is_closed = True
        self._collect()
        self._wait_for_copies()
        self._bins.clear()
        self._slabs.clear()

    def __del__(self) -> None:
        with suppress(Exception):
            self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        """The system may give freed memory to anybody, who knows nothing of our streams."""
        buffers = chain(self._returned, *self._bins.values())
        for event in chain(self._unfinished, *(buffer.last_uses() for buffer in buffers)):
            with suppress(Exception):  # a copy that failed is done as well
                event.synchronize()

    def _collect(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._in_use -= buffer.nbytes
            self._room -= buffer.room_bytes
            self._num_taken -= 1
            self._num_parts -= buffer.num_parts
            self._bins[buffer.nbytes].append(buffer)

    def _carve(self, nbytes: int, force: bool) -> HostBuffer:
        buffer = HostBuffer(nbytes, self._ranges(nbytes, force), self._slabs)
        if self._unfinished:
            self._unfinished = [event for event in self._unfinished if not event.query()]
            buffer.before = tuple(self._unfinished)
        return buffer

    def _ranges(self, nbytes: int, force: bool) -> list[Range]:
        room = -(-nbytes // ALIGNMENT) * ALIGNMENT
        for make_room in (None, self._empty_bins, self._empty_busy_bins):
            if make_room is not None:
                make_room()
            found = self._arena.allocate(nbytes)
            if found is not None:
                return [found]
            if self._may_split and make_room is not None and self._arena.free_bytes >= room:
                return self._in_pieces(nbytes)
        if force or not self._may_split:
            self.release_idle()  # nothing there is long enough
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

    def _empty_bins(self) -> None:
        """Free the ranges of buffers whose last use has finished."""
        for nbytes, buffers in list(self._bins.items()):
            busy = [b for b in buffers if not all(event.query() for event in b.last_uses())]
            for buffer in buffers:
                if buffer not in busy:
                    for one in buffer.ranges:
                        self._arena.free(one)
            self._bins[nbytes] = busy

    def _empty_busy_bins(self) -> None:
        """Free the others as well; whoever gets memory from now on waits for their uses."""
        uses = {id(event): event for event in self._unfinished}
        for buffer in chain(*self._bins.values()):
            uses |= {id(event): event for event in buffer.last_uses()}
            for one in buffer.ranges:
                self._arena.free(one)
        self._bins.clear()
        self._unfinished = list(uses.values())

    def _grow(self, nbytes: int) -> None:
        granule = granule_for(self._reserved_bytes() + nbytes)
        if -(-nbytes // granule) * granule > self.source.budget.left_bytes:
            granule = ALIGNMENT
        for slab in self.source.acquire(nbytes, granule):
            self._add(slab)

    def _rebuild(self, sizes: list[int]) -> None:
        """Slabs of exactly these sizes, keeping those there are where theirs serve."""
        wanted = Counter(sizes)
        before, self._slabs = self._slabs, []
        self._arena = Arena(alignment=ALIGNMENT)
        while before:
            slab = before.pop()
            if wanted[slab.nbytes] > 0:
                wanted[slab.nbytes] -= 1
                self._add(slab)
        del slab  # its budget, if it was not kept
        self._trim()
        for size in wanted.elements():
            for slab in self.source.acquire(size, size):
                self._add(slab)

    def _reserved_bytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def _add(self, slab: Slab) -> None:
        self._slabs.append(slab)
        self._arena.add_slab(slab.nbytes)
