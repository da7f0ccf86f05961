"""Slices of a stack of layers, cut so that the largest is as small as possible.

Another layer adds to a slice only the bytes of parameters that the slice lacks, so a shared
parameter counts once. Another layer never makes a slice smaller, so filling each slice up to a
limit takes the fewest slices. Bisection finds the smallest limit.

    slices = partition([{id(p): p.nbytes for p in layer.parameters()} for layer in layers], 3)
    layers = SliceLayers("slice 0", [layers[i] for i in slices[0]])
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.nn import Module, ModuleList

from pp_offload._slices.places import Places

Bytes = Mapping[int, int]
"""Bytes of each parameter of a layer, by the parameter's identity."""


class SliceLayers(Module):
    """Current layers of a slice, and the places of all their parameters."""

    def __init__(self, label: str, layers: Iterable[Module]) -> None:
        super().__init__()
        self._layers = ModuleList(layers)
        self.places = Places(label, self._layers, lambda parameter: True)

    def forward(self, *inputs: Any) -> Any:
        first, *later_layers = self._layers
        value = first(*inputs)
        del inputs
        for layer in later_layers:
            value = layer(value)
        return value


def partition(layers: Sequence[Bytes], num_slices: int) -> list[range]:
    """Cut layers into consecutive slices of at least one layer, and return their indices."""
    limits = range(slice_bytes(layers) + 1)
    enough = bisect_left(limits, True, key=lambda n: len(_cut(layers, num_slices, n)) <= num_slices)
    return _cut(layers, num_slices, limits[enough])


def slice_bytes(layers: Sequence[Bytes]) -> int:
    """Return the bytes of these layers together; a shared parameter counts once."""
    return sum({key: nbytes for layer in layers for key, nbytes in layer.items()}.values())


def _cut(layers: Sequence[Bytes], num_slices: int, limit_bytes: int) -> list[range]:
    """Cut slices within a limit, or of one layer; at least ``num_slices`` slices."""
    slices: list[range] = []
    begin, held, nbytes = 0, dict[int, int](), 0
    for index, layer in enumerate(layers):
        more = {key: size for key, size in layer.items() if key not in held}
        is_full = nbytes + sum(more.values()) > limit_bytes
        is_due = len(layers) - index < num_slices - len(slices)
        if index > begin and (is_full or is_due):
            slices.append(range(begin, index))
            begin, held, nbytes, more = index, {}, 0, dict(layer)
        held |= more
        nbytes += sum(more.values())
    return [*slices, range(begin, len(layers))]
