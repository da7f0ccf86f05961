"""What stays on the device, compared with the definitions read literally."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from pp_offload import OffloadConfig
from pp_offload._core.keys import ChunkKey, GroupKey
from pp_offload._groups.plan import ChunkShape, groups_to_keep, make_plan


def shape(key: ChunkKey, groups: Sequence[tuple[str, int]]) -> ChunkShape:
    return ChunkShape(key, tuple(name for name, _ in groups), tuple(size for _, size in groups))


chunk_keys = st.builds(ChunkKey, st.integers(0, 2), st.integers(0, 3))
groups = st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 20))
steps = st.lists(
    st.builds(shape, chunk_keys, st.lists(groups, max_size=5)),
    unique_by=lambda chunk: chunk.key,
    max_size=5,
)
"""Chunks in some backward order, each with its groups in forward order."""


def keys_of(chunk: ChunkShape) -> list[GroupKey]:
    return [GroupKey(chunk.key, position) for position in range(len(chunk.names))]


def margin_by_hand(chunks: list[ChunkShape]) -> set[GroupKey]:
    """Walk through backward; the first group of each name met stays."""
    first: dict[str, GroupKey] = {}
    for chunk in chunks:
        for key, name in reversed([*zip(keys_of(chunk), chunk.names, strict=True)]):
            first.setdefault(name, key)
    return set(first.values())


def first_bytes_by_hand(
    chunks: list[ChunkShape], nbytes: int, resident: set[GroupKey]
) -> set[GroupKey]:
    """The shortest run of whole groups, in order, that makes up the bytes; or all there are."""
    sizes = {
        key: size
        for chunk in chunks
        for key, size in zip(keys_of(chunk), chunk.sizes, strict=True)
        if key not in resident
    }
    sums = list(accumulate(sizes.values(), initial=0))
    count = next((n for n, total in enumerate(sums) if total >= nbytes), len(sizes))
    return set(list(sizes)[:count])


def fraction_by_hand(
    chunks: list[ChunkShape], fraction: float, resident: set[GroupKey]
) -> set[GroupKey]:
    """Per chunk, strike groups from the end until that many stay."""
    stays: set[GroupKey] = set()
    for chunk in chunks:
        eligible = [key for key in keys_of(chunk) if key not in resident]
        stays.update(eligible.pop() for _ in range(int(len(eligible) * (1 - fraction))))
    return stays


@given(steps, st.integers(0, 30), st.integers(0, 4), st.floats(0, 1))
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


@given(steps)
def test_a_plan_knows_the_last_group_of_a_name(chunks: list[ChunkShape]) -> None:
    plan = make_plan(tuple(chunks), OffloadConfig(), 0)
    for chunk in chunks:
        for position, (key, name) in enumerate(zip(keys_of(chunk), chunk.names, strict=True)):
            is_last = name not in chunk.names[position + 1 :]
            assert plan.is_last_of_its_name(key, name) == is_last
    assert not plan.is_last_of_its_name(GroupKey(ChunkKey(9, 9), 0), "a")
