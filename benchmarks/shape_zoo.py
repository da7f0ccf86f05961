"""Sizes of what one layer saves for backward, for models of many shapes, scaled down.

Dimensions and sequence lengths are divided by the same factor, so the ratios of sizes stay. One
layer saves, in bf16: input, norm, query, key, value, attention output, residual, second norm, gate,
up and activation; a mixture of experts saves the last three per expert.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

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
