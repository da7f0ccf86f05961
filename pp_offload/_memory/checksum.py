"""The checksum of bytes that leave memory: that of xxhash, which is as fast as memory is read.

total = new_checksum()
total.update(data.data)  # of a contiguous array; any number of times
total.intdigest()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numpy.typing import NDArray

if TYPE_CHECKING:
    from xxhash import xxh3_64


def new_checksum() -> xxh3_64:
    """A checksum of no bytes yet."""
    # Here, so that a machine on which nothing goes to disk and nothing is verified can do without.
    from xxhash import xxh3_64

    return xxh3_64()


def checksum(data: NDArray) -> int:
    """The checksum of a contiguous array, in 64 bits."""
    total = new_checksum()
    total.update(data.data)
    return total.intdigest()
