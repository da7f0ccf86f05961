"""Which groups a limit of device memory has room for: pure functions of what steps were like.

    demand = Demand().with_step(chunks, beside={}, in_flight=[((0, 2),)])
    fitting(demand, room_bytes=2**33, moving_bytes=2**30)

NOTE [ What stays counts for its whole chunk ]
    From the begin of a chunk's forward to the end of its backward. So a step takes no more than is
    counted, and less where a group is saved late, or was on its way at that time anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from pp_offload._core.keys import Place
from pp_offload._groups.plan import ChunkShape

InFlight = tuple[tuple[int, int], ...]
"""Virtual stages, each with the number of its chunks that are between the begin of forward and the
end of backward at the same time.
"""


@dataclass(frozen=True)
class Demand:
    """The most that steps have asked for."""

    sizes: Mapping[Place, int] = field(default_factory=dict)
    """Device bytes of the largest group at each place."""

    in_flight: frozenset[InFlight] = frozenset()
    """Chunks in flight together; those that others cover are left out."""

    def with_step(
        self,
        chunks: Iterable[ChunkShape],
        beside: Mapping[Place, int],
        in_flight: Iterable[InFlight],
    ) -> Demand:
        """The demand with one more step; an equal one if that step asks for no more.

        Args:
            chunks: Of the step.
            beside: Bytes of the same storages that do not move, where groups save views.
            in_flight: Chunks in flight, each time that another one began.
        """
        sizes = dict(self.sizes)
        for chunk in chunks:
            for key, _, group_bytes in chunk.by_key():
                nbytes = group_bytes + beside.get(key.place, 0)
                sizes[key.place] = max(sizes.get(key.place, 0), nbytes)
        more = [nums for nums in in_flight if not self.covers(nums)]
        return Demand(sizes, self.in_flight.union(more))

    def covers(self, nums: InFlight) -> bool:
        """Whether there were as many chunks of each stage before."""
        before = map(dict, self.in_flight)
        return any(all(each.get(stage, 0) >= num for stage, num in nums) for each in before)

    def nbytes(self, places: Collection[Place]) -> int:
        """The most bytes that groups at these places take together."""
        by_stage = Counter[int]()
        for place in places:
            by_stage[place.vp_stage] += self.sizes[place]
        return self.peak_bytes(by_stage)

    def peak_bytes(self, by_stage: Mapping[int, int]) -> int:
        """The most bytes at a time, where each chunk of a stage takes so many."""
        return max(
            [sum([num * by_stage.get(at, 0) for at, num in nums]) for nums in self.in_flight],
            default=0,
        )


def fitting(demand: Demand, room_bytes: int, moving_bytes: int) -> frozenset[Place]:
    """The places whose groups have room: all, or some beside what moves.

    First of the stage with the fewest chunks in flight, where a byte of memory keeps most; within a
    stage what is saved last, for backward uses it first. See NOTE [ What stays counts for its whole
    chunk ].

    Args:
        demand: Of all steps that are to have room.
        room_bytes: Beside what is needed whatever stays.
        moving_bytes: Both ways together, as long as something leaves.
    """
    places = demand.sizes.keys()
    if demand.nbytes(places) <= room_bytes:
        return frozenset(places)

    def order(place: Place) -> tuple[int, int]:
        return demand.peak_bytes({place.vp_stage: 1}), -place.position

    chosen: list[Place] = []
    by_stage = Counter[int]()
    for place in sorted(places, key=order):
        more = by_stage + Counter({place.vp_stage: demand.sizes[place]})
        if demand.peak_bytes(more) <= room_bytes - moving_bytes:
            by_stage = more
            chosen.append(place)
    return frozenset(chosen)
