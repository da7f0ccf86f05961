"""Buffers that nobody has, to be found by size, or by how long nobody had them.

bins.add(buffer)
bins.pop(nbytes)       # the one of that size that came last: it is in the cache
bins.longest_unused()  # the few to be carved anew first
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from pp_offload.tiers.buffers import HostBuffer

FEW = 16
"""Buffers looked at together."""


class Bins:
    """Free buffers. What a call costs does not depend on how many there are, or ever were."""

    def __init__(self) -> None:
        self._by_size: dict[int, dict[HostBuffer, None]] = {}
        self._oldest_first: OrderedDict[HostBuffer, None] = OrderedDict()

    def add(self, buffer: HostBuffer) -> None:
        """Nobody has it any more."""
        self._by_size.setdefault(buffer.nbytes, {})[buffer] = None
        self._oldest_first[buffer] = None

    def pop(self, nbytes: int) -> HostBuffer | None:
        """One of that size."""
        same = self._by_size.get(nbytes)
        if not same:
            return None
        buffer, _ = same.popitem()
        self._forget(buffer, same)
        return buffer

    def remove(self, buffer: HostBuffer) -> None:
        """It is carved anew."""
        same = self._by_size[buffer.nbytes]
        del same[buffer]
        self._forget(buffer, same)

    def longest_unused(self) -> list[HostBuffer]:
        """A few, the longest unused first; none if there are none."""
        return list(islice(self._oldest_first, FEW))

    @property
    def num_sizes(self) -> int:
        """How many sizes there are."""
        return len(self._by_size)

    def _forget(self, buffer: HostBuffer, same: dict[HostBuffer, None]) -> None:
        del self._oldest_first[buffer]
        if not same:  # or there would be a bin for each size ever seen
            del self._by_size[buffer.nbytes]
