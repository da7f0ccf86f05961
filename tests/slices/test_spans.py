"""Whatever shares memory is named, wherever it lies."""

from __future__ import annotations

import random

import pytest

from pp_offload._slices.spans import Span, overlapping


@pytest.mark.parametrize("seed", range(100))
def test_all_that_share_memory_are_named(seed: int) -> None:
    draw = random.Random(seed)
    spans = []
    for name in "abcdef":
        begin = draw.randrange(40)
        spans.append(Span(begin, begin + draw.randrange(1, 12), name))
    pairs = {
        frozenset((one.name, other.name))
        for one in spans
        for other in spans
        if one is not other and one.begin < other.end and other.begin < one.end
    }
    found = {frozenset(pair) for pair in overlapping(spans)}
    assert found <= pairs
    assert set().union(*found) == set().union(*pairs)
