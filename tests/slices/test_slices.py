"""Layers are cut so that the largest slice is as small as it can be."""

from __future__ import annotations

import itertools
import random

import pytest

from pp_offload._slices.slices import partition, slice_bytes


def largest(layers, slices) -> int:
    return max(slice_bytes([layers[i] for i in indices]) for indices in slices)


def smallest_largest(layers, num_slices: int) -> int:
    """Over all ways to cut."""
    cuts = itertools.combinations(range(1, len(layers)), num_slices - 1)
    ways = (zip((0, *cut), (*cut, len(layers)), strict=True) for cut in cuts)
    return min(largest(layers, [range(*ends) for ends in way]) for way in ways)


@pytest.mark.parametrize("seed", range(50))
def test_no_way_to_cut_is_better(seed: int) -> None:
    """With layers that share parameters, and some that have none."""
    draw = random.Random(seed)
    layers = [
        {key: 10 + key for key in draw.sample(range(6), draw.randrange(4))}
        for _ in range(draw.randrange(1, 9))
    ]
    for num_slices in range(1, len(layers) + 1):
        slices = partition(layers, num_slices)
        assert len(slices) == num_slices and all(slices)
        assert [i for indices in slices for i in indices] == list(range(len(layers)))
        assert largest(layers, slices) == smallest_largest(layers, num_slices)
