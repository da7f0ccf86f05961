"""Hand out byte ranges of a few big slabs, without knowing what a slab is made of.

Pinned memory and disk space are slow to acquire, so a tier acquires slabs and parcels them out
here. The arena holds numbers only, which lets one allocator serve memory, files and tests.

    arena = Arena()
    arena.add_slab(2**20)
    taken = arena.allocate(3000)  # Range(slab=0, offset=0, nbytes=3072, requested_nbytes=3000)
    arena.free(taken)             # merges with its free neighbours
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """Bytes ``offset`` to ``offset + nbytes`` of one slab, owned by whoever allocated them."""

    slab: int
    """Index of the slab, as :meth:`Arena.add_slab` returned it."""

    offset: int
    """First byte within the slab; a multiple of the arena's alignment."""

    nbytes: int
    """Reserved size: the requested one rounded up to the alignment, never zero."""

    requested_nbytes: int
    """What the caller asked for; the bytes past it are padding."""

    @property
    def end(self) -> int:
        """One past the last reserved byte."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class ArenaStatistics:
    """How full an arena is, at the moment of asking."""

    requested_bytes: int
    """Sum of what the live ranges' callers asked for."""

    reserved_bytes: int
    """Sum of the live ranges' sizes after rounding; the difference to the above is padding."""

    peak_reserved_bytes: int
    """The most ``reserved_bytes`` has been since the arena was made."""

    largest_free_bytes: int
    """The biggest request that fits without another slab."""

    capacity_bytes: int
    """Sum of the usable sizes of all slabs."""

    num_slabs: int
    """Slabs added so far."""

    num_live: int
    """Ranges allocated and not freed."""


class Arena:
    """Best fit over slabs, neighbours merged on every free.

    Search is a bisection of the free ranges ordered by (size, slab, offset), so equal fits go to
    the oldest slab and the lowest offset, and the same calls give the same ranges on every run.
    Interrupted in the middle of a call, it is of no use any more: see :meth:`of`.

    Args:
        alignment: Every offset and every size is a multiple of it. A power of two.

    Raises:
        ValueError: ``alignment`` is not a power of two.
    """

    def __init__(self, alignment: int = 512) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment is {alignment}; pass a power of two")
        self._alignment = alignment
        self._slab_starts: list[int] = []
        self._live: dict[tuple[int, int], Range] = {}
        self._free_by_size: list[tuple[int, int, int]] = []
        self._free_end_of: dict[tuple[int, int], int] = {}
        self._free_start_of: dict[tuple[int, int], int] = {}
        self._capacity_bytes = 0
        self._requested_bytes = 0
        self._reserved_bytes = 0
        self._peak_reserved_bytes = 0

    @classmethod
    def of(cls, slabs: Sequence[int], live: Iterable[Range], alignment: int = 512) -> Arena:
        """An arena made anew from what is really there, after an interrupt in the middle of a call.

        Args:
            slabs: Sizes, in the order they were added.
            live: Ranges that somebody has.
            alignment: That of the old arena.
        """
        taken: dict[int, list[Range]] = {}
        for one in live:
            taken.setdefault(one.slab, []).append(one)
        arena = cls(alignment=alignment)
        for slab, nbytes in enumerate(slabs):
            arena.add_slab(nbytes, taken.get(slab, ()))
        return arena

    def add_slab(self, nbytes: int, taken: Sequence[Range] = ()) -> int:
        """Make a slab's bytes available; a tail shorter than the alignment stays unused.

        Args:
            nbytes: Its size.
            taken: Ranges of it that are in use already.

        Returns:
            The slab's index, counting from 0 in the order of the calls.

        Raises:
            ValueError: The slab is smaller than the alignment.
        """
        usable = nbytes - nbytes % self._alignment
        if usable <= 0:
            raise ValueError(f"a slab of {nbytes} bytes; it needs at least {self._alignment}")
        slab = len(self._slab_starts)
        self._slab_starts.append(self._capacity_bytes)
        self._capacity_bytes += usable
        at = 0
        for one in sorted(taken, key=lambda one: one.offset):
            if at < one.offset:
                self._insert_free(slab, at, one.offset)
            self._count(one)
            at = one.end
        if at < usable:
            self._insert_free(slab, at, usable)
        return slab

    def allocate(self, nbytes: int) -> Range | None:
        """Take the smallest free range that holds ``nbytes``.

        Returns:
            The range, or None when nothing fits. A request for zero bytes gets a range of its own
            like any other.

        Raises:
            ValueError: ``nbytes`` is negative.
        """
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes; pass zero or more")
        reserved = self._round_up(max(nbytes, 1))
        index = self._find(reserved)
        return None if index is None else self._take(index, reserved, nbytes)

    def free(self, taken: Range) -> None:
        """Give a range back.

        Raises:
            ValueError: The range is not live here: it was freed before, or is another arena's.
        """
        if self._live.get((taken.slab, taken.offset)) is not taken:
            raise ValueError(
                f"{taken} is not allocated here; free each range once, in the arena it came from"
            )
        del self._live[taken.slab, taken.offset]
        self._requested_bytes -= taken.requested_nbytes
        self._reserved_bytes -= taken.nbytes
        start, end = self._absorb_neighbours(taken)
        self._insert_free(taken.slab, start, end)

    def slab_start(self, slab: int) -> int:
        """Where a slab would begin if all of them lay one behind the other, as in a file."""
        return self._slab_starts[slab]

    @property
    def free_bytes(self) -> int:
        """Bytes in no live range, in however many pieces."""
        return self._capacity_bytes - self._reserved_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The biggest request that fits without another slab."""
        return self._free_by_size[-1][0] if self._free_by_size else 0

    def statistics(self) -> ArenaStatistics:
        """The current counts, as a record that does not change afterwards."""
        return ArenaStatistics(
            requested_bytes=self._requested_bytes,
            reserved_bytes=self._reserved_bytes,
            peak_reserved_bytes=self._peak_reserved_bytes,
            largest_free_bytes=self.largest_free_bytes,
            capacity_bytes=self._capacity_bytes,
            num_slabs=len(self._slab_starts),
            num_live=len(self._live),
        )

    def _round_up(self, nbytes: int) -> int:
        return -(-nbytes // self._alignment) * self._alignment

    def _find(self, reserved: int) -> int | None:
        index = bisect_left(self._free_by_size, (reserved,))
        return index if index < len(self._free_by_size) else None

    def _take(self, index: int, reserved: int, requested: int) -> Range:
        size, slab, offset = self._free_by_size[index]
        self._remove_free(slab, offset, offset + size)
        if size > reserved:
            self._insert_free(slab, offset + reserved, offset + size)
        taken = Range(slab, offset, reserved, requested)
        self._count(taken)
        return taken

    def _count(self, taken: Range) -> None:
        self._live[taken.slab, taken.offset] = taken
        self._requested_bytes += taken.requested_nbytes
        self._reserved_bytes += taken.nbytes
        self._peak_reserved_bytes = max(self._peak_reserved_bytes, self._reserved_bytes)

    def _absorb_neighbours(self, freed: Range) -> tuple[int, int]:
        """Take the free ranges on both sides out of the books; the merged start and end."""
        start = self._free_start_of.get((freed.slab, freed.offset), freed.offset)
        end = self._free_end_of.get((freed.slab, freed.end), freed.end)
        if start < freed.offset:
            self._remove_free(freed.slab, start, freed.offset)
        if end > freed.end:
            self._remove_free(freed.slab, freed.end, end)
        return start, end

    def _insert_free(self, slab: int, start: int, end: int) -> None:
        insort(self._free_by_size, (end - start, slab, start))
        self._free_end_of[slab, start] = end
        self._free_start_of[slab, end] = start

    def _remove_free(self, slab: int, start: int, end: int) -> None:
        del self._free_by_size[bisect_left(self._free_by_size, (end - start, slab, start))]
        del self._free_end_of[slab, start]
        del self._free_start_of[slab, end]
