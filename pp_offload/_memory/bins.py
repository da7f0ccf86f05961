"""Buffers that nobody has, found by size or by how long nobody had them.

bins.add(buffer)
bins.pop(nbytes)       # of that size; one that no copy uses, if that is soon found
bins.longest_unused()  # the few to be carved anew first
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from pp_offload._memory.buffers import HostBuffer

FEW = 16
"""Buffers looked at together."""


class Bins:
    """Free buffers. What a call costs does not depend on how many there are, or ever were."""

    def __init__(self) -> None:
        self._by_size: dict[int, dict[HostBuffer, None]] = {}
        self._oldest_first: OrderedDict[HostBuffer, None] = OrderedDict()

    def add(self, buffer: HostBuffer) -> None:
        """Add a buffer that nobody has any more."""
        self._by_size.setdefault(buffer.nbytes, {})[buffer] = None
        self._oldest_first[buffer] = None

    def has(self, nbytes: int) -> bool:
        """Whether :meth:`pop` finds a buffer of that size."""
        return nbytes in self._by_size

    def pop(self, nbytes: int) -> HostBuffer | None:
        """A buffer of that size: the one added last if no copy uses it any more, for it may be in
        the CPU's cache; else the one added first, whose copies end before those of all others.
        """
        same = self._by_size.get(nbytes)
        if not same:
            return None
        buffer = next(reversed(same))
        if not buffer.is_idle():
            buffer = next(iter(same))
        self.remove(buffer)
        return buffer

    def remove(self, buffer: HostBuffer) -> None:
        """Remove a buffer that somebody gets, or that is carved anew."""
        same = self._by_size[buffer.nbytes]
        del same[buffer]
        del self._oldest_first[buffer]
        if not same:  # or there would be a bin for each size ever seen
            del self._by_size[buffer.nbytes]

    def longest_unused(self) -> list[HostBuffer]:
        """A few, the longest unused first; none if there are none."""
        return list(islice(self._oldest_first, FEW))

    @property
    def num_sizes(self) -> int:
        """How many sizes there are."""
        return len(self._by_size)
