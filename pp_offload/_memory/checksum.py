"""The checksum of bytes that leave memory: that of xxhash, which is as fast as memory is read.

Where xxhash is not installed, as on a machine that was given torch and numpy alone, it is Python's
own CRC of 32 bits, which finds the same faults but for one in four billion, at a lower speed.

total = new_checksum()
total.update(data.data)  # of a contiguous array; any number of times
total.intdigest()
"""

from __future__ import annotations

import zlib
from typing import Protocol

from numpy.typing import NDArray


class Checksum(Protocol):
    """A checksum of the bytes so far."""

    def update(self, data: memoryview, /) -> object:
        """These bytes follow."""

    def intdigest(self) -> int:
        """The checksum of all bytes so far."""


class Crc32:
    """The checksum of Python's own library."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        """These bytes follow."""
        self._value = zlib.crc32(data, self._value)

    def intdigest(self) -> int:
        """The checksum of all bytes so far."""
        return self._value


def new_checksum() -> Checksum:
    """A checksum of no bytes yet. Two of one process are of one kind."""
    # Here, so that a machine on which nothing goes to disk and nothing is verified imports neither.
    try:
        from xxhash import xxh3_64
    except ModuleNotFoundError:
        return Crc32()
    return xxh3_64()


def checksum_version() -> str:
    """Which one is used, for reports."""
    try:
        import xxhash
    except ModuleNotFoundError:
        return "not installed; checksums are zlib.crc32"
    return str(xxhash.VERSION)


def checksum(data: NDArray) -> int:
    """The checksum of a contiguous array, in 64 bits; in 32 without xxhash."""
    total = new_checksum()
    total.update(data.data)
    return total.intdigest()
