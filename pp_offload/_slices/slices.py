"""Slices of a stack of layers, of about equal bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.nn import Module, ModuleList

from pp_offload._slices.places import Places


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


def partition(layers: Sequence[Mapping[int, int]], num_slices: int) -> list[range]:
    """Cut layers into consecutive slices of at least one layer, and return their indices.

    Slice k of n ends with the layer behind which there are nearest to k/n of all bytes, where a
    shared parameter counts once.

    Args:
        layers: Bytes of the parameters of each layer, by identity.
        num_slices: At most the number of layers.
    """
    seen: dict[int, int] = {}
    ends = []
    for layer in layers:
        seen |= layer
        ends.append(sum(seen.values()))
    slices, begin = [], 0
    for number in range(1, num_slices):
        share = ends[-1] * number / num_slices
        last = len(layers) - num_slices + number
        later_first = range(last, begin, -1)  # a layer that adds no bytes joins the slice before
        end = min(later_first, key=lambda end: abs(ends[end - 1] - share))
        slices.append(range(begin, end))
        begin = end
    return [*slices, range(begin, len(layers))]
