"""Tensors as addressable memory, which is read without a trace; its checksums; free ranges of it.

Checksums are those of xxhash, which is as fast as memory is read. Without xxhash, as where only
torch and numpy are installed, they are the slower CRC-32 of Python, which misses one fault in four
billion.

    total = new_checksum()
    total.update(as_array(tensor).data)  # any number of times
    total.intdigest()

    free = Ranges()
    free.add(0, 4096)
    start = free.take(1000)  # at the lowest address that has room; None if no range has
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter


def outside_inference_mode() -> AbstractContextManager[object]:
    """Return a context where new tensors are no inference tensors, which only that mode may write.

    An ``inference_mode(False)`` that an interrupt cuts off ends when its traceback is freed. One of
    a hook would then turn grad off, as it is inside a hook. So it is left out where not needed.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def has_storage(tensor: Tensor) -> bool:
    """Whether ``tensor`` is dense memory that can be addressed."""
    is_plain = type(tensor) in (Tensor, Parameter) and not tensor.is_nested
    return is_plain and tensor.layout is torch.strided


class _Memory:
    """Source of a numpy array: the memory of ``tensor``, kept alive with its ``owner``."""

    def __init__(self, tensor: Tensor, owner: object) -> None:
        self.tensor, self.owner = tensor, owner
        self.__array_interface__: dict[str, Any] = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.numel(),),
            "typestr": "|u1",
            "version": 3,
        }


def as_array(tensor: Tensor, owner: object = None) -> NDArray[np.uint8]:
    """Return the memory of a flat ``uint8`` host tensor; it keeps the tensor, and ``owner``."""
    # Tensor.numpy() forbids the storage another size for good, and the user may own it.
    return np.asarray(_Memory(tensor, owner)) if tensor.numel() else np.empty(0, np.uint8)


def owned_by(owner: object, memory: Tensor) -> Tensor:
    """Return flat ``uint8`` host memory as a storage of its own, which keeps ``owner``."""
    return torch.frombuffer(as_array(memory, owner), dtype=torch.uint8)


class Crc32:
    """The CRC-32 of Python's library, under the names of xxhash."""

    _value = 0

    def update(self, data: memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def intdigest(self) -> int:
        return self._value


def new_checksum() -> Any:
    """Return a checksum of no bytes yet; always of the same kind in one process."""
    try:  # here, because most programs need no checksum, and then need not import xxhash
        from xxhash import xxh3_64
    except ModuleNotFoundError:
        return Crc32()
    return xxh3_64()


def checksum(data: NDArray) -> int:
    """Return the checksum of a contiguous array: 64 bits, or 32 without xxhash."""
    total = new_checksum()
    total.update(data.data)
    return int(total.intdigest())


class Ranges:
    """Ranges in the order of their addresses. Neighbours are always merged. A request gets the
    first range with room. On the shapes of models that wastes less than the best fitting range,
    which leaves splinters.
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
