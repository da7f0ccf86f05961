"""How much device memory is allocated, as the host allocates and frees it.

A caching allocator gives memory back to its stream when the host lets go of the tensor, whatever
that stream has still to run. So allocated bytes change in the host's order, not by clocks.

    memory = DeviceMemory()
    memory.see(tensor.untyped_storage())
    memory.live_bytes, memory.peak_bytes
"""

from __future__ import annotations

import weakref
from collections import deque

from torch import UntypedStorage

ROUNDING_BYTES = 512
"""Device allocators round what is asked for up to this."""


class _Allocation(weakref.ref[UntypedStorage]):
    """A storage, held weakly, and what is known of it when it is gone."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


class DeviceMemory:
    """Counts the bytes of storages that were seen and are alive."""

    def __init__(self) -> None:
        self._live_bytes = 0
        self._peak_bytes = 0
        self._alive: dict[int, _Allocation] = {}
        self._gone: deque[_Allocation] = deque()

    @property
    def live_bytes(self) -> int:
        """Of the storages alive."""
        self._forget_gone()
        return self._live_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at a time."""
        self._forget_gone()
        return self._peak_bytes

    def take_peak(self) -> int:
        """The most since this was last called."""
        self._forget_gone()
        peak, self._peak_bytes = self._peak_bytes, self._live_bytes
        return peak

    def see(self, storage: UntypedStorage) -> None:
        """A storage on the device: count it, unless it is known and has the same size."""
        self._forget_gone()
        key, nbytes = storage._cdata, -(-storage.nbytes() // ROUNDING_BYTES) * ROUNDING_BYTES
        known = self._alive.get(key)
        if known is not None and known() is storage:
            self._live_bytes += nbytes - known.nbytes  # it was resized
            known.nbytes = nbytes
        else:
            new = _Allocation(storage, self._gone.append)
            new.key, new.nbytes = key, nbytes
            self._alive[key] = new
            self._live_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)

    def _forget_gone(self) -> None:
        while self._gone:
            one = self._gone.popleft()
            self._live_bytes -= one.nbytes
            if self._alive.get(one.key) is one:
                del self._alive[one.key]
