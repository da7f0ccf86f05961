"""How fast bytes go to the disk tier and back, beside plain writes and reads by the same threads.

The same buffers, of 1 to 64 MiB, are written and read back by as many threads as the tier has:
once through the tier, which places, queues and checks them, and once by bare ``pwrite`` and
``preadv`` at rising offsets of a file of its own. Both in turns, in one process; a figure is the
median of the rounds' ratios. Twice: to the disk itself, where a write ends when the disk has the
bytes and the system's cache is emptied before the read; and with that cache, which is memory, so
that the checksum costs as much as a good part of the copy.

    python benchmarks/disk_tier.py --dir /scratch --json disk_tier.json

Figures
    throughput_ratio   time of the plain way / time of the tier, writing and reading, on the disk
    cached_ratio       the same in the system's cache, which never waits for a disk
    checksum_mib_per_s of bytes in memory, one thread
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from command import parser_for, write_figures
from torch import Tensor

from pp_offload._memory.addresses import checksum
from pp_offload._memory.disk_file import NUM_THREADS, DiskFile, DiskWrite

MIB = 2**20
SIZES_MIB = (1, 4, 16, 64)
TARGET = 0.9


class Plain:
    """Bare system calls."""

    def __init__(self, directory: Path, nbytes: list[int]) -> None:
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)
        self.fd = self._file.fileno()
        self._threads = ThreadPoolExecutor(NUM_THREADS)
        self._offsets = [sum(nbytes[:i]) for i in range(len(nbytes))]

    def write(self, buffers: list[Tensor]) -> None:
        self._run(os.pwrite, buffers)

    def read(self, buffers: list[Tensor]) -> None:
        self._run(lambda fd, data, at: os.preadv(fd, [data], at), buffers)

    def _run(self, step: Callable[[int, memoryview, int], int], buffers: list[Tensor]) -> None:
        def run(data: memoryview, at: int) -> None:
            while data:
                done = step(self.fd, data, at)
                data, at = data[done:], at + done

        views = [buffer.numpy().data for buffer in buffers]
        list(self._threads.map(run, views, self._offsets))


class Tier:
    """The engine's disk tier."""

    def __init__(self, directory: Path) -> None:
        self._file = DiskFile(directory)
        self._writes: list[DiskWrite] = []

    def write(self, buffers: list[Tensor]) -> None:
        self._writes.clear()
        self._writes = [self._file.write([data]) for data in buffers]
        for write in self._writes:
            write.synchronize()
            assert write.failure is None

    def read(self, buffers: list[Tensor]) -> None:
        pairs = zip(self._writes, buffers, strict=True)
        for event in [self._file.read_into(write, [data]) for write, data in pairs]:
            event.synchronize()

    @property
    def fd(self) -> int:
        return self._file._file.fd


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def write_and_read(
    way: Plain | Tier, sources: list[Tensor], targets: list[Tensor], *, is_synced: bool
) -> tuple[float, float]:
    """Seconds of both."""

    def write() -> None:
        way.write(sources)
        if is_synced:
            os.fdatasync(way.fd)

    written_s = seconds_of(write)
    if is_synced:
        os.posix_fadvise(way.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    read_s = seconds_of(lambda: way.read(targets))
    assert all(map(torch.equal, targets, sources))
    return written_s, read_s


def measure(directory: Path, total_mib: int, rounds: int) -> dict[str, Any]:
    """All figures, printed as they come."""
    nbytes: list[int] = []
    while sum(nbytes) < total_mib * MIB:
        nbytes.append(SIZES_MIB[len(nbytes) % len(SIZES_MIB)] * MIB)
    sources = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in nbytes]
    targets = [torch.zeros_like(source) for source in sources]
    ways = {"plain": Plain(directory, nbytes), "tier": Tier(directory)}
    mib, figures = sum(nbytes) / MIB, {}
    print(f"{mib:.0f} MiB in buffers of {SIZES_MIB} MiB, {NUM_THREADS} threads")
    for key, is_synced in (("throughput_ratio", True), ("cached_ratio", False)):
        title = "on the disk" if is_synced else "in the cache"
        taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name in sorted(ways, reverse=number % 2 == 1):
                both = write_and_read(ways[name], sources, targets, is_synced=is_synced)
                taken[name].append((*both, sum(both)))
        print(f"\n  {title + ', median MiB/s':32}{'write':>10}{'read':>10}{'both':>10}")
        columns = {name: [*zip(*rows[1:], strict=True)] for name, rows in taken.items()}
        for name, (write, read, whole) in columns.items():  # the first round makes the files
            rates = [mib / statistics.median(column) for column in (write, read, whole)]
            print(f"  {name:32}{rates[0]:10.0f}{rates[1]:10.0f}{2 * rates[2]:10.0f}")
        ratios = [
            statistics.median(a / b for a, b in zip(plain, tier, strict=True))
            for plain, tier in zip(columns["plain"], columns["tier"], strict=True)
        ]
        print(f"  {'ratio':32}" + "".join(f"{ratio:10.3f}" for ratio in ratios))
        figures[key] = ratios[2]
    print(f"  target on the disk{TARGET:44.3f}")
    summed_s = seconds_of(lambda: [checksum(source.numpy()) for source in sources])
    figures["checksum_mib_per_s"] = mib / summed_s
    print(f"\n  checksum alone, one thread, MiB/s {figures['checksum_mib_per_s']:8.0f}")
    return figures


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    total_mib, rounds = (64, 1) if options.quick else (1024, 9)
    write_figures(measure(options.dir, total_mib, rounds), options.json)


if __name__ == "__main__":
    main()
