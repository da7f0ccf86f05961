"""Host memory that the engine holds for what it must.

For every shape of the zoo a few 1F1B steps take and return what groups of several layers and
microbatches need, last layer first. Beside it, for the same sizes, what rounding every tensor up to
a power of two would hold, as PyTorch's pinned allocator does.

    python benchmarks/host_memory.py --json host_memory.json

Figures
    footprint_ratio              host bytes held after four steps / bytes live at the peak; the
                                 largest over the zoo, each shape in a fresh pool
    allocations_after_first_step how often the system was asked after the first step, all shapes

A layer saves, in bf16: input, norm, query, key, value, attention output, residual, second norm,
gate, up and activation; a mixture of experts saves the last three per expert. Dimensions and
sequence lengths are divided by the same factor, so the ratios of sizes stay.

Nothing is copied, so memory that a late copy still uses plays no part, and neither does what a
pinned allocator keeps.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from command import parser_for, write_figures

from pp_offload._memory.host_pool import HostPool

NUM_LAYERS = 4
NUM_MICROBATCHES = 8
IN_FLIGHT = 4
NUM_STEPS = 4
FOOTPRINT_TARGET = 1.03
BYTES_PER_ELEMENT = 2

WIDTHS = [
    (2048, 5632, 1.0),
    (3072, 8192, 1 / 3),
    (4096, 14336, 1 / 4),
    (5120, 25600, 1 / 8),
    (6144, 16384, 1 / 8),
    (7168, 18432, 1 / 8),
    (8192, 28672, 1 / 8),
    (3584, 18944, 1 / 7),
]
"""Hidden size, width of the MLP, and key-value heads per query head."""

LENGTHS = [1000, 4096, 6144, 8192]
NUM_EXPERTS = 64

allocate = partial(torch.empty, dtype=torch.uint8)


@dataclass(frozen=True)
class Shape:
    """A model and a sequence length."""

    hidden: int
    ffn: int
    kv_ratio: float
    length: int
    num_experts: int = 1

    def layer_bytes(self, draw: random.Random) -> list[int]:
        """The sizes of one layer's saved tensors, in the order they are saved. In bytes."""
        row = self.length * BYTES_PER_ELEMENT
        width = row * self.hidden
        kv = row * int(self.hidden * self.kv_ratio)
        sizes = [width, width, width, kv, kv, width, width, width]
        for tokens in self._split(draw):
            sizes += [tokens * BYTES_PER_ELEMENT * self.ffn] * 3
        return [size for size in sizes if size]

    def _split(self, draw: random.Random) -> list[int]:
        """Tokens per expert, at random."""
        if self.num_experts == 1:
            return [self.length]
        cuts = sorted(draw.randint(0, self.length) for _ in range(self.num_experts - 1))
        return [b - a for a, b in zip([0, *cuts], [*cuts, self.length], strict=True)]

    def __str__(self) -> str:
        kind = f", {self.num_experts} experts" if self.num_experts > 1 else ""
        return f"h {self.hidden}, ffn {self.ffn}, s {self.length}{kind}"


def shape_zoo(factor: int) -> Iterator[Shape]:
    """All shapes, every dimension divided by ``factor``."""
    for hidden, ffn, kv_ratio in WIDTHS:
        for length in LENGTHS:
            yield Shape(hidden // factor, ffn // factor, kv_ratio, length // factor)
    for length in LENGTHS:
        yield Shape(7168 // factor, 2048 // factor, 1 / 8, length // factor, NUM_EXPERTS)


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
            peak = max(peak, sum(live))
            rounded_peak = max(rounded_peak, sum(map(power_of_two, live)))
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


def measure(factor: int) -> dict[str, Any]:
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
    return {
        "footprint_ratio": worst["ours"],
        "footprint_ratio_powers_of_two": worst["powers_of_two"],
        "allocations_after_first_step": allocations,
        "by_shape": by_shape,
    }


def main() -> None:
    options = parser_for(__doc__).parse_args()
    torch.set_num_threads(1)
    write_figures(measure(64 if options.quick else 16), options.json)


if __name__ == "__main__":
    main()
