"""Which groups a limit has room for, compared with what that means read literally."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from pp_offload._core.keys import ChunkKey, Place
from pp_offload._groups.plan import ChunkShape, ChunksInFlight
from pp_offload._groups.room import Demand, fitting

places = st.builds(Place, st.integers(0, 1), st.integers(0, 3))
moments = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
    lambda nums: tuple((stage, num) for stage, num in enumerate(nums) if num)
)
demands = st.builds(
    Demand,
    st.dictionaries(places, st.integers(0, 9)),
    st.frozensets(moments, max_size=4),
)
byte_counts = st.integers(-5, 120)


def taken(demand: Demand, stay: Collection[Place], moment: ChunksInFlight) -> int:
    """Chunk by chunk, group by group."""
    chunks = [stage for stage, num in moment for _ in range(num)]
    return sum(demand.sizes[place] for stage in chunks for place in stay if place.vp_stage == stage)


@given(demands, byte_counts, st.integers(0, 40))
def test_what_stays_fits(demand: Demand, room: int, moving: int) -> None:
    found = fitting(demand, room, moving)
    assert found <= demand.sizes.keys()
    leaves = any(demand.sizes[place] for place in demand.sizes.keys() - found)
    for moment in demand.in_flight:
        stays = taken(demand, found, moment)
        assert stays == 0 or stays + moving * leaves <= room


@given(demands, st.integers(0, 40))
def test_with_room_for_all_everything_stays(demand: Demand, moving: int) -> None:
    room = max([taken(demand, demand.sizes, one) for one in demand.in_flight], default=0)
    assert fitting(demand, room, moving) == demand.sizes.keys()


def test_where_fewer_chunks_are_in_flight_more_stays() -> None:
    """A byte of memory keeps one of each of them."""
    sizes = {Place(stage, position): 10 for stage in (0, 1) for position in (0, 1)}
    demand = Demand(sizes, frozenset({((0, 4), (1, 1)), ((0, 1), (1, 2))}))
    found = [fitting(demand, room, 0) for room in (9, 20, 40, 79, 80)]
    assert found == [
        frozenset(),
        {Place(1, 1)},
        {Place(1, 0), Place(1, 1)},
        {Place(1, 0), Place(1, 1), Place(0, 1)},
        {Place(1, 0), Place(1, 1), Place(0, 1)},
    ]


def test_what_moves_has_its_room_as_long_as_something_leaves() -> None:
    demand = Demand({Place(0, 0): 10, Place(0, 1): 10}, frozenset({((0, 2),)}))
    assert fitting(demand, 39, 15) == {Place(0, 1)}
    assert fitting(demand, 34, 15) == frozenset()
    assert fitting(demand, 40, 15) == demand.sizes.keys()


def test_a_step_asks_for_the_most_of_all_before() -> None:
    shape = ChunkShape(ChunkKey(0, 3), ("a", "b"), (5, 7))
    one = Demand().with_step([shape], {Place(0, 1): 2}, [((0, 1),)])
    assert one == Demand({Place(0, 0): 5, Place(0, 1): 9}, frozenset({((0, 1),)}))
    assert one.with_step([shape], {}, [((0, 1),)]) == one
    longer = one.with_step([shape._replace(sizes=(6, 1))], {}, [((0, 2),)])
    assert longer.sizes == {Place(0, 0): 6, Place(0, 1): 9}
    assert longer.peak_bytes({0: 1}) == 2
