"""What stays on the device, compared with the definitions read literally."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from pp_offload import OffloadConfig
from pp_offload._core.keys import ChunkKey, GroupKey
from pp_offload._groups.plan import (
    ChunkShape,
    groups_to_keep,
    make_plan,
)


class Shape(NamedTuple):
    """A group of a step."""

    name: str
    nbytes: int


groups = st.builds(Shape, st.sampled_from(["a", "b", "c"]), st.integers(0, 20))


@st.composite
def steps(draw: st.DrawFn) -> list[ChunkShape]:
    """Chunks in some backward order, each with its groups in forward order."""
    keys = draw(
        st.lists(st.builds(ChunkKey, st.integers(0, 2), st.integers(0, 3)), unique=True, max_size=5)
    )
    return [shape(key, draw(st.lists(groups, max_size=5))) for key in keys]


def shape(key: ChunkKey, groups: Sequence[Shape]) -> ChunkShape:
    return ChunkShape(key, tuple(g.name for g in groups), tuple(g.nbytes for g in groups))


fractions = st.floats(0, 1)


def key_of(chunk: ChunkShape, position: int) -> GroupKey:
    return GroupKey(chunk.key, position)


def forward_keys(chunks: list[ChunkShape]) -> list[tuple[GroupKey, Shape]]:
    return [(key_of(c, i), g) for c in chunks for i, g in enumerate(map(Shape, c.names, c.sizes))]


def margin_by_hand(chunks: list[ChunkShape]) -> set[GroupKey]:
    """Walk through backward; the first group of each name met stays."""
    seen: set[str] = set()
    stays: set[GroupKey] = set()
    for chunk in chunks:
        for position in reversed(range(len(chunk.names))):
            if chunk.names[position] not in seen:
                seen.add(chunk.names[position])
                stays.add(key_of(chunk, position))
    return stays


def first_bytes_by_hand(
    chunks: list[ChunkShape], nbytes: int, resident: set[GroupKey]
) -> set[GroupKey]:
    """The shortest run of whole groups, in order, that makes up the bytes; or all there are."""
    eligible = [(key, group) for key, group in forward_keys(chunks) if key not in resident]
    sums = list(accumulate((group.nbytes for _, group in eligible), initial=0))
    enough = [n for n, total in enumerate(sums) if total >= nbytes]
    count = enough[0] if enough else len(eligible)
    return {key for key, _ in eligible[:count]}


def fraction_by_hand(
    chunks: list[ChunkShape], fraction: float, resident: set[GroupKey]
) -> set[GroupKey]:
    """Per chunk, strike groups from the end until that many stay."""
    stays: set[GroupKey] = set()
    for chunk in chunks:
        keys = (key_of(chunk, i) for i in range(len(chunk.names)))
        eligible = [k for k in keys if k not in resident]
        for _ in range(int(len(eligible) * (1 - fraction))):
            stays.add(eligible.pop())
    return stays


@given(steps(), st.integers(0, 30), st.integers(0, 4), fractions)
def test_the_rules_apply_one_after_the_other(
    chunks: list[ChunkShape], delta: int, rank: int, fraction: float
) -> None:
    config = OffloadConfig(
        delta_offload_bytes_across_pp_ranks=delta, activation_offload_fraction=fraction
    )
    expected = margin_by_hand(chunks)
    expected |= first_bytes_by_hand(chunks, rank * delta, expected)
    expected |= fraction_by_hand(chunks, fraction, expected)
    before = list(chunks)
    assert groups_to_keep(chunks, config, rank) == expected
    assert chunks == before, "inputs are not changed"


@given(steps())
def test_a_plan_knows_the_last_group_of_a_name(chunks: list[ChunkShape]) -> None:
    plan = make_plan(tuple(chunks), OffloadConfig(), 0)
    for chunk in chunks:
        for position, name in enumerate(chunk.names):
            is_last = name not in chunk.names[position + 1 :]
            assert plan.is_last_of_its_name(key_of(chunk, position), name) == is_last
    assert not plan.is_last_of_its_name(GroupKey(ChunkKey(9, 9), 0), "a")
