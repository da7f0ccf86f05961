"""Host memory that the engine holds for what it must, and the cost of its pool.

For every shape of the zoo a few 1F1B steps take and return what groups of several layers and
microbatches need, last layer first. Beside it, for the same sizes, what rounding every tensor up to
a power of two would hold, as PyTorch's pinned allocator does.

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
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import chain, count
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
"""Sizes of the tensors that a layer saves."""

FOOTPRINT_TARGET = 1.03
SLOPE_TARGET = 1.2

allocate = partial(torch.empty, dtype=torch.uint8)


class Owner:
    """Holds the memory of a group."""

    def __init__(self, pool: HostPool, sizes: list[int]) -> None:
        self.host = pool.take(sizes, self)


def measure_footprint(shape: Shape) -> dict[str, float]:
    """Bytes held for one shape, after 1F1B steps whose experts, if any, change."""
    draw, pool = random.Random(0), HostPool(allocate)
    waiting: deque[list[Owner]] = deque()
    num_allocations, peak, rounded_peak = [], 0, 0
    for _ in range(NUM_STEPS):
        for _ in range(NUM_MICROBATCHES):
            layers = [shape.layer_bytes(draw) for _ in range(NUM_LAYERS)]
            waiting.append([Owner(pool, sizes) for sizes in layers])
            live = [*chain(*(owner.host.sizes for owners in waiting for owner in owners))]
            peak, rounded_peak = (
                max(peak, sum(live)),
                max(rounded_peak, sum(map(power_of_two, live))),
            )
            if len(waiting) == IN_FLIGHT:
                free(waiting.popleft())
        while waiting:
            free(waiting.popleft())
        pool.settle()
        num_allocations.append(pool.num_allocations)
    return {
        "peak_mib": peak / 2**20,
        "ours": pool.reserved_bytes / peak,
        "powers_of_two": rounded_peak / peak,
        "allocations": num_allocations[-1] - num_allocations[0],
    }


def free(owners: list[Owner]) -> None:
    """Return the memory of a microbatch, last layer first."""
    while owners:
        owners.pop()


def power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()


def live_groups(live: int) -> Callable[[], None]:
    """Takes and gives back in the engine's pool, of which half is live."""
    pool, numbers = HostPool(allocate), count()
    held = deque(Owner(pool, [512 * (1 + i % NUM_SIZES)]) for i in range(2 * live))
    for _ in range(live):
        held.popleft()
        held.rotate(-1)

    def work() -> None:
        held.append(Owner(pool, [512 * (1 + next(numbers) % NUM_SIZES)]))
        held.popleft()

    return work


def live_tensors(live: int) -> Callable[[], None]:
    """Takes and gives back in the reference's pool, of which half is live."""
    pool, numbers = GPUTensorPool("cpu"), count()
    held = deque(pool.allocate((128 * (1 + i % NUM_SIZES),)) for i in range(2 * live))
    for _ in range(live):
        pool.free(held.popleft())
        held.rotate(-1)

    def work() -> None:
        held.append(pool.allocate((128 * (1 + next(numbers) % NUM_SIZES),)))
        pool.free(held.popleft())

    return work


def take_and_give_us(make: Callable[[int], Callable[[], None]], seconds: float) -> dict[int, float]:
    """Least time of taking one more and giving it back, by how many are live; in turns."""
    cases = {live: make(live) for live in (100, 10_000)}
    least = dict.fromkeys(cases, float("inf"))
    gc.collect()
    gc.disable()
    end, is_first = time.perf_counter() + seconds, True
    while is_first or time.perf_counter() < end:
        is_first = False
        for live, work in cases.items():
            start = time.perf_counter()
            for _ in range(200):
                work()
            least[live] = min(least[live], (time.perf_counter() - start) / 200 * 1e6)
    gc.enable()
    return least


def measure(factor: int, seconds: float) -> dict[str, Any]:
    """All figures, printed as they come."""
    print(f"host bytes held / bytes live at the peak; every dimension divided by {factor}")
    print(f"  {'shape':36}{'peak MiB':>9}{'ours':>8}{'powers':>8}{'asked':>7}")
    by_shape: dict[str, dict[str, float]] = {}
    for shape in shape_zoo(factor):
        by_shape[str(shape)] = row = measure_footprint(shape)
        print(
            f"  {shape!s:36}{row['peak_mib']:9.1f}{row['ours']:8.3f}{row['powers_of_two']:8.3f}"
            f"{row['allocations']:7.0f}"
        )
    worst = {key: max(row[key] for row in by_shape.values()) for key in ("ours", "powers_of_two")}
    allocations = int(sum(row["allocations"] for row in by_shape.values()))
    print("  powers: each tensor rounded up to a power of two;")
    print("  asked: how often the system was asked for memory after the first step (target 0)")
    print(f"  largest: ours {worst['ours']:.3f} (target {FOOTPRINT_TARGET:.3f}),", end=" ")
    print(f"powers of two {worst['powers_of_two']:.3f}; asked {allocations}")
    print("\ntake one more and give one back, by how many are live, in us")
    slopes = {}
    for name, make in (("host pool", live_groups), ("GPUTensorPool", live_tensors)):
        least = take_and_give_us(make, seconds)
        slopes[name] = least[10_000] / least[100]
        print(f"  {name:16} 100: {least[100]:6.2f}   10000: {least[10_000]:6.2f}   ", end="")
        print(f"ratio {slopes[name]:.3f} (target {SLOPE_TARGET:.3f})")
    return {
        "footprint_ratio": worst["ours"],
        "footprint_ratio_powers_of_two": worst["powers_of_two"],
        "allocations_after_first_step": allocations,
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
    figures = measure(factor, seconds)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
