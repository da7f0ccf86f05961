"""Which groups a limit of device memory has room for: pure functions of what steps were like.

    demand = Demand().with_step(chunks, beside={}, in_flight=[((0, 2),)])
    fitting(demand, room_bytes=2**33, moving_bytes=2**30)

NOTE [ What stays counts for its whole chunk ]
    From the begin of a chunk's forward to the end of its backward. So a step takes no more than is
    counted, and less where a group is saved late, or was on its way at that time anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import add

from pp_offload._policy.plan import ChunkShape, Place

InFlight = tuple[tuple[int, int], ...]
"""Virtual stages, and how many of their chunks are between the begin of forward and the end of
backward at the same time.
"""


@dataclass(frozen=True)
class Demand:
    """What steps have asked for, at most."""

    sizes: Mapping[Place, int] = field(default_factory=dict)
    """Device bytes of the largest group at each place."""

    in_flight: frozenset[InFlight] = frozenset()
    """Chunks that were there together; what others cover is left out."""

    def with_step(
        self,
        chunks: Iterable[ChunkShape],
        beside: Mapping[Place, int],
        in_flight: Iterable[InFlight],
    ) -> Demand:
        """What these and one more have asked for; an equal one if that asks for no more.

        Args:
            chunks: Of the step.
            beside: Bytes of the same storages that do not move, where groups save views.
            in_flight: All that there were at a time.
        """
        sizes = dict(self.sizes)
        for chunk in chunks:
            for key, group in chunk.by_key():
                place = Place(key.chunk.vp_stage, key.position)
                sizes[place] = max(sizes.get(place, 0), group.nbytes + beside.get(place, 0))
        return Demand(sizes, self.in_flight.union(one for one in in_flight if not self.covers(one)))

    def covers(self, nums: InFlight) -> bool:
        """Whether there were as many chunks of each stage before."""
        if nums in self.in_flight:
            return True
        before = map(dict, self.in_flight)
        return any(all(one.get(stage, 0) >= num for stage, num in nums) for one in before)

    def most_in_flight(self, vp_stage: int) -> int:
        """Chunks of one stage."""
        return max([dict(one).get(vp_stage, 0) for one in self.in_flight], default=0)

    def nbytes(self, places: Collection[Place]) -> int:
        """What groups at these places take together, at most."""
        each = [self.at_each_time(place) for place in places]
        return max(map(sum, zip(*each, strict=True)), default=0)

    def at_each_time(self, place: Place) -> list[int]:
        """What the groups at a place take, for each of :attr:`in_flight`."""
        nbytes = self.sizes[place]
        return [
            nbytes * sum([num for stage, num in one if stage == place.vp_stage])
            for one in self.in_flight
        ]


def fitting(demand: Demand, room_bytes: int, moving_bytes: int) -> frozenset[Place]:
    """As much as there is room for: all, or some and what moves.

    First from the stage with the fewest chunks in flight, where a byte of memory keeps most; of a
    stage what is saved last, for backward uses it first. See NOTE [ What stays counts for its whole
    chunk ].

    Args:
        demand: Of all steps that are to have room.
        room_bytes: Beside what is needed whatever stays.
        moving_bytes: What may be on its way as long as something leaves, both ways together.
    """
    places = demand.sizes.keys()
    if demand.nbytes(places) <= room_bytes:
        return frozenset(places)
    most = {place.vp_stage: demand.most_in_flight(place.vp_stage) for place in places}

    def order(place: Place) -> tuple[int, int]:
        return most[place.vp_stage], -place.position

    chosen: list[Place] = []
    taken = [0] * len(demand.in_flight)
    for place in sorted(places, key=order):
        now = list(map(add, taken, demand.at_each_time(place)))
        if max(now, default=0) <= room_bytes - moving_bytes:
            taken = now
            chosen.append(place)
    return frozenset(chosen)
