"""The checksum of bytes that leave memory: that of xxhash, which is as fast as memory is read.

Where xxhash is not installed, as on a machine with torch and numpy alone, it is Python's own CRC of
32 bits, which misses a fault in four billion, and is slower.

total = new_checksum()
total.update(data.data)  # of a contiguous array; any number of times
total.intdigest()
"""

from __future__ import annotations

import zlib
from typing import Any

from numpy.typing import NDArray


class Crc32:
    """The checksum of Python's own library, under the names of xxhash."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        """These bytes follow."""
        self._value = zlib.crc32(data, self._value)

    def intdigest(self) -> int:
        """The checksum of all bytes so far."""
        return self._value


def new_checksum() -> Any:
    """A checksum of no bytes yet, as of ``xxhash``. Two of one process are of one kind."""
    # Here, so that a machine on which nothing goes to disk and nothing is verified imports neither.
    try:
        from xxhash import xxh3_64
    except ModuleNotFoundError:
        return Crc32()
    return xxh3_64()


def checksum_version() -> str:
    """Which is used, for reports."""
    try:
        import xxhash
    except ModuleNotFoundError:
        return "not installed; checksums are zlib.crc32"
    return str(xxhash.VERSION)


def checksum(data: NDArray) -> int:
    """The checksum of a contiguous array, in 64 bits; in 32 without xxhash."""
    total = new_checksum()
    total.update(data.data)
    return int(total.intdigest())
