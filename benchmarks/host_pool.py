"""HostPool and DiskFile beside today's host memory and disk tier, as ratios of one run.

python benchmarks/host_pool.py --dir /scratch
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from disk_tier import MIB, SIZES_MIB, Plain, Tier, measure_ways, seconds_of
from shape_zoo import Shape, shape_zoo
from torch import Tensor

from pp_offload._memory.budget import HostBudget
from pp_offload._memory.disk_file import DiskFile, DiskWrite
from pp_offload._memory.host import HostMemory
from pp_offload._memory.host_pool import HostPool


class Owner:
    __slots__ = ("__weakref__", "host")

    def __init__(self, pool: HostPool, sizes: list[int]) -> None:
        self.host = pool.take(sizes, self)


class New(HostPool):
    def lend(self, sizes: list[int]) -> Any:
        return Owner(self, sizes)


class Today(HostMemory):
    reserved_bytes = property(lambda self: self.statistics().reserved)
    num_allocations = property(lambda self: self.statistics().num_allocations)
    settle = HostMemory.compact

    def lend(self, sizes: list[int]) -> Any:
        return self.allocate(sum(sizes), len(sizes))


class NewTier(Tier):
    fd = property(lambda self: self.file._file.fd)

    def __init__(self, directory: Path) -> None:
        self.file = DiskFile(directory)
        self.clear()

    def clear(self) -> None:
        self.writes: list[DiskWrite] = []

    def write(self, buffers: list[Tensor]) -> None:
        self.writes = [self.file.write([data]) for data in buffers]
        assert not any(write.synchronize() or write.failure for write in self.writes)

    def read(self, buffers: list[Tensor]) -> None:
        pairs = zip(self.writes, buffers, strict=True)
        for event in [self.file.read_into(write, [data]) for write, data in pairs]:
            event.synchronize()


def footprint(memory: Any, shape: Shape, num_steps: int, least: float) -> tuple[float, int]:
    """Largest reserved / peak after a step, and allocations after the first; 1F1B, 4 in flight."""
    draw, live, peak, after = random.Random(0), 0, 0, []
    for _ in range(num_steps):
        waiting: deque[Any] = deque()
        for number in range(8 + 3):
            if number < 8:
                sized = replace(shape, length=int(shape.length * draw.uniform(least, 1)))
                layers = [sized.layer_bytes(draw) for _ in range(4)]
                waiting.append((sum(map(sum, layers)), [memory.lend(sizes) for sizes in layers]))
                live += waiting[-1][0]
                peak = max(peak, live)
            if number >= 3:
                live -= waiting.popleft()[0]
        memory.settle()
        after.append((memory.reserved_bytes / peak, memory.num_allocations))
    return max(ratio for ratio, _ in after), after[-1][1] - after[0][1]


def takes_us(make: Any, rounds: int) -> list[float]:
    """Of a take of four payloads with sizes seen before, and one free; 100 and 10,000 live."""
    sizes = [[512 * (1 + i)] * 4 for i in range(11)]

    def work(memory: Any, held: deque[Any]) -> None:
        for i in range(220):
            held.append(memory.lend(sizes[i % 11]))
            held.popleft()

    pairs = [(make(), deque[Any]()) for _ in range(2)]
    for (memory, held), num_live in zip(pairs, (100, 10_000), strict=True):
        held.extend(memory.lend(sizes[i % 11]) for i in range(2 * num_live))
        for _ in range(num_live):
            held.popleft()
            held.rotate(-1)
    taken = [[seconds_of(partial(work, *pair)) for pair in pairs] for _ in range(rounds)]
    return [min(column) / 220 * 1e6 for column in zip(*taken, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    steps, rounds = 200, 9
    torch.set_num_threads(1)
    gc.disable()
    zoo, rows, budget = list(shape_zoo(1)), {}, HostBudget(2**50)
    on_cpu = partial(torch.empty, dtype=torch.uint8)
    on_meta = partial(on_cpu, device="meta")
    for name, make in (("new", New), ("today", Today)):
        meta, cpu = partial(make, on_meta, budget), partial(make, on_cpu, budget)
        fixed = [footprint(meta(), shape, 4, 1) for shape in zoo]
        lengths = [footprint(meta(), shape, steps, 0.125) for shape in zoo[3:32:8]]
        few, many = takes_us(cpu, 100 * rounds)
        rows[name] = {
            "L4 reserved / peak, worst of the zoo": max(ratio for ratio, _ in fixed),
            "L5 allocations after the first step": sum(late for _, late in fixed),
            "F31 reserved / peak, random lengths": max(ratio for ratio, _ in lengths),
            "us per take of 4 and free, 100 live": few,
            "L6 the same with 10,000 live / 100": many / few,
        }
    nbytes = [MIB * size for size in SIZES_MIB] * 3
    sources = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in nbytes]
    tiers = {"new": NewTier(options.dir), "today": Tier(options.dir, nbytes)}
    ways = {"plain": Plain(options.dir, nbytes), **tiers}
    taken = measure_ways(ways, sources, rounds, is_synced=True)  # type: ignore[arg-type]
    for name in tiers:
        pairs = zip(taken["plain", "both"], taken[name, "both"], strict=True)
        rows[name]["L7 plain / ours, on the disk"] = statistics.median(a / b for a, b in pairs)
    print(f"{'':40}{'new':>8}{'today':>8}{'new/today':>11}")
    for key, new in rows["new"].items():
        today = rows["today"][key]
        print(f"{key:40}{new:8.3f}{today:8.3f}{new / today if today else 1:11.3f}")


if __name__ == "__main__":
    main()
