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

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pp_offload._memory.checksum import checksum
from pp_offload._memory.disk_file import NUM_THREADS, DiskFile, DiskWrite

MIB = 2**20
SIZES_MIB = (1, 4, 16, 64)
TARGET = 0.9

Log = Callable[[str], None]


class Plain:
    """What nobody can do without."""

    def __init__(self, directory: Path, nbytes: list[int]) -> None:
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)
        self._threads = ThreadPoolExecutor(NUM_THREADS)
        ends = [sum(nbytes[: i + 1]) for i in range(len(nbytes))]
        self._offsets = [0, *ends[:-1]]

    def write(self, buffers: list[Tensor]) -> None:
        self._run(os.pwrite, buffers)

    def read(self, buffers: list[Tensor]) -> None:
        self._run(lambda fd, data, at: os.preadv(fd, [data], at), buffers)

    def _run(self, step: Callable[[int, memoryview, int], int], buffers: list[Tensor]) -> None:
        fd = self._file.fileno()

        def run(data: memoryview, at: int) -> None:
            while data:
                done = step(fd, data, at)
                data, at = data[done:], at + done

        views = [buffer.numpy().data for buffer in buffers]
        jobs = [self._threads.submit(run, *job) for job in zip(views, self._offsets, strict=True)]
        for job in jobs:
            job.result()

    def clear(self) -> None:
        pass

    @property
    def fd(self) -> int:
        return self._file.fileno()


class Tier:
    """Ours."""

    def __init__(self, directory: Path) -> None:
        self._file = DiskFile(directory)
        self._writes: list[DiskWrite] = []

    def write(self, buffers: list[Tensor]) -> None:
        self._writes = [self._file.write([data]) for data in buffers]
        for write in self._writes:
            write.synchronize()
            assert write.failure is None

    def read(self, buffers: list[Tensor]) -> None:
        pairs = zip(self._writes, buffers, strict=True)
        for event in [self._file.read_into(write, [data]) for write, data in pairs]:
            event.synchronize()

    def clear(self) -> None:
        self._writes.clear()

    @property
    def fd(self) -> int:
        return self._file._file.fd


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def write_and_sync(way: Plain | Tier, buffers: list[Tensor]) -> None:
    way.write(buffers)
    os.fdatasync(way.fd)


def measure(directory: Path, total_mib: int, rounds: int, log: Log) -> dict[str, Any]:
    nbytes: list[int] = []
    while sum(nbytes) < total_mib * MIB:
        nbytes.append(SIZES_MIB[len(nbytes) % len(SIZES_MIB)] * MIB)
    sources = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in nbytes]
    ways = {"plain": Plain(directory, nbytes), "tier": Tier(directory)}
    log(f"{sum(nbytes) / MIB:.0f} MiB in buffers of {SIZES_MIB} MiB, {NUM_THREADS} threads")
    figures = {}
    for key, title, is_synced in (
        ("throughput_ratio", "on the disk", True),
        ("cached_ratio", "in the system's cache", False),
    ):
        taken = measure_ways(ways, sources, rounds, is_synced)
        log(f"\n  {title + ', median MiB/s':32}{'write':>10}{'read':>10}{'both':>10}")
        for name in ways:
            rates = (
                factor * sum(nbytes) / MIB / statistics.median(taken[name, what])
                for what, factor in (("write", 1), ("read", 1), ("both", 2))
            )
            log(f"  {name:32}" + "".join(f"{rate:10.0f}" for rate in rates))
        ratios = {
            what: statistics.median(
                a / b for a, b in zip(taken["plain", what], taken["tier", what], strict=True)
            )
            for what in ("write", "read", "both")
        }
        log(f"  {'ratio':32}" + "".join(f"{ratio:10.3f}" for ratio in ratios.values()))
        figures[key] = ratios["both"]
    log(f"  target on the disk{TARGET:44.3f}")
    summed = seconds_of(lambda: deque((checksum(s.numpy()) for s in sources), maxlen=0))
    figures["checksum_mib_per_s"] = sum(nbytes) / MIB / summed
    log(f"\n  checksum alone, one thread, MiB/s {figures['checksum_mib_per_s']:8.0f}")
    return figures


def measure_ways(
    ways: dict[str, Plain | Tier], sources: list[Tensor], rounds: int, is_synced: bool
) -> dict[tuple[str, str], list[float]]:
    """Seconds of every round, by way and by what was done."""
    targets = [torch.zeros_like(source) for source in sources]
    taken: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for name in sorted(ways, reverse=number % 2 == 1):
            way = ways[name]
            way.clear()
            write = write_and_sync if is_synced else type(way).write
            written = seconds_of(partial(write, way, sources))
            if is_synced:
                os.posix_fadvise(way.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            read = seconds_of(partial(way.read, targets))
            assert all(map(torch.equal, targets, sources))
            if number:  # the first round makes the files
                taken.setdefault((name, "write"), []).append(written)
                taken.setdefault((name, "read"), []).append(read)
                taken.setdefault((name, "both"), []).append(written + read)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput of the disk tier.")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--mib", type=int, default=1024, help="written and read in a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="one round; the figures mean nothing")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    total_mib, rounds = (64, 1) if options.quick else (options.mib, options.rounds)
    figures = measure(options.dir, total_mib, rounds, print)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
