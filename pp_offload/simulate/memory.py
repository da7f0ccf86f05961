"""Count of device memory, as the host allocates and frees it.

A caching allocator returns memory to its stream when the host drops the tensor, whatever that
stream has yet to run. So allocated bytes change in the host's order, not by clocks.

    memory = DeviceMemory()
    memory.see(tensor.untyped_storage())
    memory.live_bytes, memory.peak_bytes
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from itertools import count

from torch import UntypedStorage

ROUNDING_BYTES = 512
"""Multiple to which device allocators round sizes up."""


def rounded(nbytes: int) -> int:
    """Return the bytes that a device allocator takes for ``nbytes``."""
    return -(-nbytes // ROUNDING_BYTES) * ROUNDING_BYTES


class Allocation(weakref.ref[UntypedStorage]):
    """A storage, held weakly, with its size, and its number in the order of allocation."""

    __slots__ = ("key", "nbytes", "number")
    key: int
    nbytes: int
    number: int


class DeviceMemory:
    """Count of the bytes of living storages that were seen, and of ``taken_bytes``.

    ``note`` is called with the number of a storage and its additional bytes when it is first seen,
    is resized and dies.
    """

    def __init__(
        self, taken_bytes: int = 0, note: Callable[[int, int], object] | None = None
    ) -> None:
        self._live_bytes = self._peak_bytes = taken_bytes
        self._note = note
        self._numbers = count()
        self._alive: dict[int, Allocation] = {}
        self._gone: deque[Allocation] = deque()  # a weak reference's callback may only append

    @property
    def live_bytes(self) -> int:
        """Bytes of the storages alive."""
        self._free_gone()
        return self._live_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at a time."""
        self._free_gone()
        return self._peak_bytes

    def take_peak(self) -> int:
        """Return the peak since the last call, or since the beginning."""
        self._free_gone()
        peak, self._peak_bytes = self._peak_bytes, self._live_bytes
        return peak

    def see(self, storage: UntypedStorage) -> Allocation:
        """Count a storage on the device, unless it is counted with the same size."""
        self._free_gone()
        key, nbytes = storage._cdata, rounded(storage.nbytes())
        allocation = self._alive.get(key)
        if allocation is None or allocation() is not storage:
            allocation = self._alive[key] = Allocation(storage, self.dies)
            allocation.key, allocation.nbytes, allocation.number = key, 0, next(self._numbers)
        if more_bytes := nbytes - allocation.nbytes:  # it is new, or was resized
            self._add(more_bytes)
            if self._note is not None:
                self._note(allocation.number, more_bytes)
            allocation.nbytes = nbytes
        return allocation

    def dies(self, allocation: Allocation) -> None:
        """Free the memory of a dead storage, when bytes are next read."""
        if self._note is not None:
            self._note(allocation.number, -allocation.nbytes)
        self._gone.append(allocation)

    def _add(self, nbytes: int) -> None:
        self._live_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)

    def _free_gone(self) -> None:
        while self._gone:
            allocation = self._gone.popleft()
            self._add(-allocation.nbytes)
            if self._alive.get(allocation.key) is allocation:
                del self._alive[allocation.key]
