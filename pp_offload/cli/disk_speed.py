"""How fast a directory's disk is, by one small file that is gone afterwards.

speed = disk_speed(Path("/scratch"), nbytes=64 * 2**20)
speed.write_bytes_per_s, speed.read_bytes_per_s
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PIECE_BYTES = 2**20


@dataclass(frozen=True)
class DiskSpeed:
    """Of one file, written and read once."""

    write_bytes_per_s: float
    """Until it is on the disk, as fsync says."""

    read_bytes_per_s: float
    """After the system was asked to forget what it had of it in memory."""


def disk_speed(directory: Path, nbytes: int) -> DiskSpeed:
    """Write and read a file of that size. It has no name, so it is gone however this ends.

    Raises:
        OSError: The directory takes no file, or is full.
    """
    piece = os.urandom(PIECE_BYTES)  # what a disk cannot make smaller
    num = max(1, nbytes // PIECE_BYTES)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        begin_s = time.perf_counter()
        for _ in range(num):
            file.write(piece)
        os.fsync(file.fileno())
        written_s = time.perf_counter() - begin_s
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begin_s = time.perf_counter()
        while file.read(PIECE_BYTES):
            pass
        read_s = time.perf_counter() - begin_s
    return DiskSpeed(num * PIECE_BYTES / written_s, num * PIECE_BYTES / read_s)
