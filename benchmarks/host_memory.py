"""How much host memory the engine holds for what it must, and what its pool costs.

For every shape of the zoo a few 1F1B steps take and return what groups of several layers and
microbatches need, last layer first. Beside it, for the same
sizes, what a pool of exact shapes would hold, and what rounding every tensor to a power of two
would, as PyTorch's pinned allocator does.

    python benchmarks/host_memory.py --json host_memory.json

Figures
    footprint_ratio              host bytes held after four steps / bytes live at the peak; the
                                 largest over the zoo, each shape in a fresh pool
    allocations_after_first_step how often the system was asked after the first step, all shapes
    free_slope                   time to take and give back with 10^4 buffers live / with 10^2, of
                                 sizes seen before; the larger one of the engine's pool and of
                                 GPUTensorPool

Nothing is copied, so memory that a late copy still uses plays no part, and neither does what a
pinned allocator keeps.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from shape_zoo import Shape, shape_zoo

from pp_offload import GPUTensorPool
from pp_offload._memory.host_pool import HostPool

NUM_LAYERS = 4
NUM_MICROBATCHES = 8
IN_FLIGHT = 4
NUM_STEPS = 4
NUM_SIZES = 11
"""Of the tensors a layer saves."""

FOOTPRINT_TARGET = 1.03
SLOPE_TARGET = 1.2

allocate = partial(torch.empty, dtype=torch.uint8)

Log = Callable[[str], None]
Microbatch = list[list[int]]
"""The bytes of each payload, by layer."""


@dataclass
class Baselines:
    """What other pools would hold, by arithmetic."""

    live: Counter[int] = field(default_factory=Counter)
    most: Counter[int] = field(default_factory=Counter)
    live_bytes: int = 0
    peak_bytes: int = 0
    rounded_bytes: int = 0
    rounded_peak: int = 0

    def take(self, nbytes: int) -> None:
        self.live[nbytes] += 1
        self.most[nbytes] = max(self.most[nbytes], self.live[nbytes])
        self.live_bytes += nbytes
        self.rounded_bytes += power_of_two(nbytes)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.rounded_peak = max(self.rounded_peak, self.rounded_bytes)

    def give(self, nbytes: int) -> None:
        self.live[nbytes] -= 1
        self.live_bytes -= nbytes
        self.rounded_bytes -= power_of_two(nbytes)

    @property
    def exact_shapes_bytes(self) -> int:
        """A pool that never lets a tensor of one size serve another."""
        return sum(nbytes * most for nbytes, most in self.most.items())


def power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()


class Owner:
    """Whoever has this has the memory of a group."""

    def __init__(self, pool: HostPool, sizes: list[int]) -> None:
        self.host = pool.take(sizes, self)


def run_step(pool: HostPool, microbatches: Iterable[Microbatch], baselines: Baselines) -> None:
    """1F1B: some forwards ahead, then a backward for every forward."""
    waiting: deque[list[Owner]] = deque()

    def backward() -> None:
        owners = waiting.popleft()
        while owners:
            for nbytes in owners.pop().host.sizes:
                baselines.give(nbytes)

    for microbatch in microbatches:
        waiting.append([Owner(pool, sizes) for sizes in microbatch])
        for nbytes in chain(*microbatch):
            baselines.take(nbytes)
        if len(waiting) == IN_FLIGHT:
            backward()
    while waiting:
        backward()
    pool.settle()


def measure_footprint(shape: Shape) -> dict[str, float]:
    """Bytes held for one shape, after steps whose experts, if any, change."""
    draw = random.Random(0)
    pool, baselines = HostPool(allocate), Baselines()
    asked = []
    for _ in range(NUM_STEPS):
        step = [
            [shape.layer_bytes(draw) for _ in range(NUM_LAYERS)] for _ in range(NUM_MICROBATCHES)
        ]
        run_step(pool, step, baselines)
        asked.append(pool.num_allocations)
    peak = baselines.peak_bytes
    figures = {
        "peak_mib": peak / 2**20,
        "ours": pool.reserved_bytes / peak,
        "exact_shapes": baselines.exact_shapes_bytes / peak,
        "powers_of_two": baselines.rounded_peak / peak,
        "allocations": asked[-1] - asked[0],
    }
    return figures


def take_and_give_ns(make: Callable[[int], Callable[[], None]], seconds: float) -> dict[int, float]:
    """Least time of taking one more and giving it back, by how many are live; in turns."""
    cases = {live: make(live) for live in (100, 10_000)}
    least: dict[int, float] = {}
    gc.collect()
    gc.disable()
    end = time.perf_counter() + seconds
    try:
        while True:
            for live, work in cases.items():
                start = time.perf_counter_ns()
                for _ in range(200):
                    work()
                spent = (time.perf_counter_ns() - start) / 200
                least[live] = min(least.get(live, spent), spent)
            if time.perf_counter() > end:
                return least
    finally:
        gc.enable()


def live_groups(live: int) -> Callable[[], None]:
    """The engine's pool with groups of many sizes live, half of what it ever held."""
    pool = HostPool(allocate)
    held = deque(Owner(pool, [512 * (1 + i % NUM_SIZES)]) for i in range(2 * live))
    for _ in range(live):
        held.popleft()
        held.rotate(-1)
    sizes = iter(range(10**9))

    def work() -> None:
        held.append(Owner(pool, [512 * (1 + next(sizes) % NUM_SIZES)]))
        held.popleft()

    return work


def live_pool(live: int) -> Callable[[], None]:
    """The reference's pool, likewise."""
    pool = GPUTensorPool("cpu")
    held = deque(pool.allocate((128 * (1 + i % NUM_SIZES),)) for i in range(2 * live))
    for _ in range(live):
        pool.free(held.popleft())
        held.rotate(-1)
    sizes = iter(range(10**9))

    def work() -> None:
        held.append(pool.allocate((128 * (1 + next(sizes) % NUM_SIZES),)))
        pool.free(held.popleft())

    return work


def measure(factor: int, seconds: float, log: Log) -> dict[str, Any]:
    log(f"host bytes held / bytes live at the peak; every dimension divided by {factor}")
    log(f"  {'shape':36}{'peak MiB':>9}{'ours':>8}{'exact':>8}{'powers':>8}{'asked':>7}")
    by_shape: dict[str, dict[str, float]] = {}
    for shape in shape_zoo(factor):
        by_shape[str(shape)] = one = measure_footprint(shape)
        log(
            f"  {shape!s:36}{one['peak_mib']:9.1f}{one['ours']:8.3f}{one['exact_shapes']:8.3f}"
            f"{one['powers_of_two']:8.3f}{one['allocations']:7.0f}"
        )
    log("  exact: a pool of exact shapes; powers: each tensor rounded up to a power of two;")
    log("  asked: how often the system was asked for memory after the first step")
    worst = {
        key: max(one[key] for one in by_shape.values())
        for key in ("ours", "exact_shapes", "powers_of_two")
    }
    allocations = sum(one["allocations"] for one in by_shape.values())
    log(f"  largest: ours {worst['ours']:.3f} (target {FOOTPRINT_TARGET:.3f}),")
    log(
        f"           exact {worst['exact_shapes']:.3f}, powers of two {worst['powers_of_two']:.3f};"
    )
    log(f"           asked {allocations:.0f} (target 0)")

    log("\ntake one more and give one back, by how many are live, in us")
    slopes = {}
    for name, make in (("host pool", live_groups), ("GPUTensorPool", live_pool)):
        least = take_and_give_ns(make, seconds)
        slopes[name] = least[10_000] / least[100]
        log(
            f"  {name:16} 100: {least[100] / 1e3:6.2f}   10000: {least[10_000] / 1e3:6.2f}   "
            f"ratio {slopes[name]:.3f} (target {SLOPE_TARGET:.3f})"
        )
    return {
        "footprint_ratio": worst["ours"],
        "footprint_ratio_exact_shapes": worst["exact_shapes"],
        "footprint_ratio_powers_of_two": worst["powers_of_two"],
        "allocations_after_first_step": int(allocations),
        "free_slope": max(slopes.values()),
        "by_shape": by_shape,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Host memory held, and the cost of its pool.")
    parser.add_argument("--factor", type=int, default=16, help="divide every dimension by this")
    parser.add_argument("--seconds", type=float, default=10.0, help="per pool")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; the figures mean nothing")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    factor, seconds = (64, 0.1) if options.quick else (options.factor, options.seconds)
    figures = measure(factor, seconds, print)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
