"""Ranges of an address space, such as the free ones of host slabs or of a file.

free = Ranges()
free.add(0, 4096)
start = free.take(1000)  # at the lowest address that has room; None if no range has
free.add(start, 1000)    # merges with its neighbours
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator


class Ranges:
    """Ranges in the order of their addresses. Neighbours are always merged.

    First fit packs payloads that leave and return in turns as in a ring: on the shapes of models
    it wastes less than best fit, which leaves splinters.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._sizes: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._sizes, strict=True)

    def take(self, nbytes: int) -> int | None:
        """Take ``nbytes`` out; return where they start, or None if no range is long enough."""
        for index, size in enumerate(self._sizes):
            if size >= nbytes:
                start = self._starts[index]
                if size == nbytes:
                    del self._starts[index], self._sizes[index]
                else:
                    self._starts[index] += nbytes
                    self._sizes[index] -= nbytes
                return start
        return None

    def add(self, start: int, nbytes: int) -> None:
        """Add a range that overlaps none."""
        starts, sizes = self._starts, self._sizes
        index = bisect_left(starts, start)
        if index < len(starts) and start + nbytes == starts[index]:
            nbytes += sizes[index]
            del starts[index], sizes[index]
        if index and starts[index - 1] + sizes[index - 1] == start:
            sizes[index - 1] += nbytes
        else:
            starts.insert(index, start)
            sizes.insert(index, nbytes)

    def take_whole(self, start: int, nbytes: int) -> bool:
        """Take exactly this range out; return False if it is not free or has a neighbour."""
        index = bisect_left(self._starts, start)
        if (self._starts[index : index + 1], self._sizes[index : index + 1]) != ([start], [nbytes]):
            return False
        del self._starts[index], self._sizes[index]
        return True
