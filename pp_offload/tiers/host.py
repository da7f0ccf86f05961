"""Host memory for offloaded bytes: slabs from the backend, carved by an arena, kept for reuse.

A step needs the sizes the last one needed, so a freed buffer waits in a bin of its size and the
next request of that size takes it: no search, no system allocation. Before new memory is asked for,
the bins go back to the arena, where neighbours become one range again.

    buffer = tier.take(nbytes)   # its last_use must have finished before it is written
    tier.give(buffer)            # from any thread, also from a destructor
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pp_offload.backends import Event
from pp_offload.errors import ClosedError
from pp_offload.tiers.arena import Arena, Range

ALIGNMENT = 512
SLAB_BYTES = 2**20
"""The smallest slab. A power of two: the pinned allocator would round up to one."""


class HostBuffer:
    """A piece of host memory, and the copy that used it last."""

    __slots__ = ("_typed", "bytes", "last_use", "nbytes", "range")

    def __init__(self, range_: Range, data: Tensor) -> None:
        self.range = range_
        self.bytes = data
        self.nbytes = data.numel()
        self.last_use: Event | None = None
        self._typed: Tensor = data

    def shaped(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The buffer as a contiguous tensor; made once as long as the shape stays the same."""
        if self._typed.shape != shape or self._typed.dtype != dtype:
            self._typed = self.bytes.view(dtype).view(shape)
        return self._typed


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

    num_allocations: int
    """How often the system was asked."""


class HostTier:
    """Bounded by what was live at the peak, not by all sizes ever seen.

    Args:
        allocate: Gives a flat ``uint8`` host tensor of a number of bytes, or raises MemoryError.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._arena = Arena(alignment=ALIGNMENT)
        self._slabs: list[Tensor] = []
        self._bins: defaultdict[int, list[HostBuffer]] = defaultdict(list)
        self._returned: deque[HostBuffer] = deque()
        self._in_use = self._peak = self._num_taken = 0
        self._is_closed = False

    def take(self, nbytes: int) -> HostBuffer:
        """A buffer of ``nbytes``; wait for its ``last_use`` before writing.

        Raises:
            MemoryError: The host has no more to give.
            ClosedError: The tier was closed.
        """
        if self._is_closed:
            raise ClosedError("the host tier is closed; make a new manager to go on")
        if self._returned:
            self._collect()
        ready = self._bins.get(nbytes)
        buffer = ready.pop() if ready else self._carve(nbytes)
        self._in_use += nbytes
        self._num_taken += 1
        if self._in_use > self._peak:
            self._peak = self._in_use
        return buffer

    def give(self, buffer: HostBuffer) -> None:
        """Hand a buffer back. Safe in a destructor: it is only noted, and filed later."""
        self._returned.append(buffer)

    def statistics(self) -> HostStatistics:
        """Exact at the call."""
        self._collect()
        reserved = sum(slab.numel() for slab in self._slabs)
        return HostStatistics(self._in_use, self._peak, reserved, self._num_taken, len(self._slabs))

    def close(self) -> None:
        """Drop all memory. The caller made sure that no copy uses it."""
        self._is_closed = True
        self._bins.clear()
        self._slabs.clear()

    def _collect(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._in_use -= buffer.nbytes
            self._num_taken -= 1
            self._bins[buffer.nbytes].append(buffer)

    def _carve(self, nbytes: int) -> HostBuffer:
        found = self._arena.allocate(nbytes)
        if found is None:
            self._empty_bins()
            found = self._arena.allocate(nbytes)
        if found is None:
            self._grow(nbytes)
            found = self._arena.allocate(nbytes)
        assert found is not None
        data = self._slabs[found.slab][found.offset : found.offset + nbytes]
        return HostBuffer(found, data)

    def _empty_bins(self) -> None:
        # A range may be carved anew once its last user has finished; until then it stays binned.
        for nbytes, buffers in list(self._bins.items()):
            waiting = [b for b in buffers if b.last_use is not None and not b.last_use.query()]
            for buffer in buffers:
                if buffer not in waiting:
                    self._arena.free(buffer.range)
            self._bins[nbytes] = waiting

    def _grow(self, nbytes: int) -> None:
        aligned = -(-nbytes // ALIGNMENT) * ALIGNMENT
        size = max(SLAB_BYTES, 1 << (aligned - 1).bit_length())
        self._slabs.append(self._allocate(size))
        self._arena.add_slab(size)
