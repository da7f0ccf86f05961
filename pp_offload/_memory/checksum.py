"""The checksum of bytes that leave memory, by xxhash, which is as fast as memory is read.

Without xxhash, as where only torch and numpy are installed, it is the slower CRC-32 of Python,
which misses one fault in four billion.

total = new_checksum()
total.update(data.data)  # of a contiguous array; any number of times
total.intdigest()
"""

from __future__ import annotations

import zlib
from typing import Any

from numpy.typing import NDArray


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
