"""What stays on the device, compared with the definitions read literally."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pp_offload import OffloadConfig
from pp_offload._core.group import ChunkKey, GroupKey, Place
from pp_offload._groups.plan import ChunkShape, ChunksInFlight, groups_to_keep, make_plan
from pp_offload._groups.which_stay import Beside, Change, Demand, History, fitting


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


# Which groups a limit has room for


places = st.builds(Place, st.integers(0, 1), st.integers(0, 3))
moments = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
    lambda nums: tuple((stage, num) for stage, num in enumerate(nums) if num)
)


def demand_of(sizes: dict[Place, tuple[int, int]], moments: Any) -> Demand:
    """Of what moves, and what is computed again."""
    whole = {place: sum(both) for place, both in sizes.items()}
    lean = {place: nbytes for place, (nbytes, _) in sizes.items()}
    return Demand(whole, lean, moments, Counter({0: 2, 1: 3}))


demands = st.builds(
    demand_of,
    st.dictionaries(places, st.tuples(st.integers(0, 9), st.sampled_from([0, 0, 3, 9]))),
    st.frozensets(moments, max_size=4),
)


def taken(sizes: Mapping[Place, int], moment: ChunksInFlight) -> int:
    """Chunk by chunk, group by group."""
    chunks = [stage for stage, num in moment for _ in range(num)]
    return sum(
        nbytes for stage in chunks for place, nbytes in sizes.items() if place.vp_stage == stage
    )


@given(demands, st.integers(-5, 120), st.integers(0, 40), st.integers(0, 90))
def test_what_stays_fits(demand: Demand, room: int, moving: int, hidden: int) -> None:
    stay = fitting(demand, room, moving, hidden)
    assert all(nbytes in (demand.lean[at], demand.sizes[at]) for at, nbytes in stay.items())
    leaves = any(demand.sizes[place] for place in demand.sizes.keys() - stay)
    for moment in demand.in_flight:
        stays = taken(stay, moment)
        assert stays == 0 or stays + moving * leaves <= room


@given(demands, st.integers(0, 40))
def test_with_room_for_all_everything_stays(demand: Demand, moving: int) -> None:
    """As it is; and with a byte less, without some of what is computed again."""
    for sizes in (demand.sizes, demand.lean):
        room = max([taken(sizes, key) for key in demand.in_flight], default=0)
        stay = fitting(demand, room, moving)
        assert stay.keys() == demand.sizes.keys()
        assert sizes is demand.lean or stay == sizes


def test_what_is_computed_again_goes_before_anything_leaves() -> None:
    sizes, lean = ({Place(0, 0): size, Place(0, 1): size} for size in (10, 6))
    demand = Demand(sizes, lean, frozenset({((0, 2),)}))
    assert fitting(demand, 39, 15) == {Place(0, 0): 6, Place(0, 1): 10}
    assert fitting(demand, 24, 15) == lean
    assert fitting(demand, 23, 10) == {Place(0, 1): 6}


def test_copies_that_hide_replace_computing_again() -> None:
    """As many as hide, of groups far apart; with more room fewer leave."""
    sizes, lean = ({Place(0, at): size for at in range(4)} for size in (10, 6))
    demand = Demand(sizes, lean, frozenset({((0, 1),)}), Counter({0: 2}))

    def stay(room: int, hidden: int) -> dict[int, int]:
        return {at.position: size for at, size in fitting(demand, room, 2, hidden).items()}

    assert stay(26, 0) == {0: 6, 1: 6, 2: 6, 3: 6}
    assert stay(26, 12) == {1: 6, 2: 6, 3: 10}
    assert stay(32, 12) == {1: 10, 2: 10, 3: 10}
    assert stay(22, 24) == {1: 10, 3: 10}
    assert stay(40, 24) == {0: 10, 1: 10, 2: 10, 3: 10}


def test_a_step_asks_for_the_most_of_all_before() -> None:
    shape = ChunkShape(ChunkKey(0, 3), ("a", "b"), (5, 7))
    demand = Demand.of([shape], {Place(0, 1): Beside(2, 4)}, [((0, 1),)])
    lean = {Place(0, 0): 5, Place(0, 1): 9}
    assert demand == Demand(lean | {Place(0, 1): 13}, lean, frozenset({((0, 1),)}), Counter({0: 1}))
    assert demand.merged(Demand.of([shape], {}, [((0, 1),)])) == demand
    longer = demand.merged(Demand.of([shape._replace(sizes=(6, 1))], {}, [((0, 2),)]))
    assert longer.sizes == {Place(0, 0): 6, Place(0, 1): 13}
    assert longer.peak_bytes({0: 1}) == 2
    assert longer.in_flight == {((0, 2),)}


def test_larger_steps_are_forgotten_once_smaller_ones_repeat() -> None:
    """Later, twice as often, each time that a larger one comes back."""

    def step(nbytes: int) -> Demand:
        return Demand.of([ChunkShape(ChunkKey(0, 0), ("a",), (nbytes,))], {}, [((0, 1),)])

    history = History()
    changes = [history.add(step(nbytes)) for nbytes in (9, 9, 5, 4, 5, 5, 9, 5, 5, 5, 5, 5)]
    more, none, less = Change.MORE, Change.NONE, Change.LESS
    assert changes == [more, none, none, none, none, less, more, none, none, none, less, none]
    assert history.demand == step(5)
