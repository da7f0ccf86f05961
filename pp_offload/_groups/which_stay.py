"""Device memory that a step's groups need, and which groups have room below a limit.

    history = History()
    history.add(Demand.of(chunks, beside, in_flight))
    fitting(history.demand, room_bytes, moving_bytes, hidden_bytes)

Numbers alone: nothing here touches a tensor, a stream or a clock.

NOTE [ Chunks keep their room ]
    A group that stays counts from the begin of its chunk's forward to the end of the chunk's
    backward. So a step takes no more than is counted, and less if a group is saved late.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from pp_offload._core.group import Place
from pp_offload._groups.plan import ChunkShape, ChunksInFlight

NUM_EQUAL = 2  # smaller steps after which larger ones before them are forgotten


class Beside(NamedTuple):
    """Bytes that a group holds besides those that it may send, if it stays: the rest of storages of
    which it saves parts, and bytes that recipes would compute again.
    """

    rest_bytes: int = 0
    again_bytes: int = 0


@dataclass(frozen=True)
class Demand:
    """The most memory that groups of some steps needed."""

    # Device bytes of the largest group at each place; ``lean`` without those computed again.
    sizes: Mapping[Place, int] = field(default_factory=dict)
    lean: Mapping[Place, int] = field(default_factory=dict)
    in_flight: frozenset[ChunksInFlight] = frozenset()  # moments without those that others cover
    num_chunks: Counter[int] = field(default_factory=Counter)  # of each virtual stage in a step

    @classmethod
    def of(
        cls,
        chunks: Iterable[ChunkShape],
        beside: Mapping[Place, Beside],
        in_flight: Iterable[ChunksInFlight],
    ) -> Demand:
        """Return the demand of a step, with its chunks in flight each time that one began."""
        sizes, lean, num_chunks = Counter[Place](), Counter[Place](), Counter[int]()
        for chunk in chunks:
            num_chunks[chunk.key.vp_stage] += 1
            for key, _, group_bytes in chunk.by_key():
                place, (rest_bytes, again_bytes) = key.place, beside.get(key.place, Beside())
                lean[place] = max(lean[place], group_bytes + rest_bytes)
                sizes[place] = max(sizes[place], group_bytes + rest_bytes + again_bytes)
        return cls(dict(sizes), dict(lean), _largest(in_flight), num_chunks)

    def merged(self, step: Demand) -> Demand:
        """Return the most of both; an equal demand if the step needs no more."""
        sizes, lean = _most(self.sizes, step.sizes), _most(self.lean, step.lean)
        in_flight = _largest(self.in_flight | step.in_flight)
        return Demand(sizes, lean, in_flight, self.num_chunks | step.num_chunks)

    def again_bytes(self, chosen: Mapping[Place, int]) -> int:
        """Return the bytes that recipes compute again in a step, if places keep ``chosen``."""
        return sum(
            self.num_chunks[place.vp_stage] * (nbytes - self.lean[place])
            for place, nbytes in self.sizes.items()
            if chosen.get(place) != nbytes
        )

    def nbytes(self, sizes: Mapping[Place, int]) -> int:
        """Return the most bytes that groups of these sizes at these places take together."""
        return self.peak_bytes(by_stage(sizes))

    def peak_bytes(self, by_stage: Mapping[int, int]) -> int:
        """Return the most bytes at a time, from the bytes of a chunk of each stage."""
        moments = self.in_flight
        sums = [sum([num * by_stage.get(at, 0) for at, num in nums]) for nums in moments]
        return max(sums, default=0)


def covers(moments: Iterable[ChunksInFlight], nums: ChunksInFlight) -> bool:
    """Whether at one of these moments at least ``nums`` chunks of each stage were in flight."""
    return any(all(then.get(stage, 0) >= num for stage, num in nums) for then in map(dict, moments))


def _largest(moments: Iterable[ChunksInFlight]) -> frozenset[ChunksInFlight]:
    """Return the moments without those that others cover."""
    moments = frozenset(moments)
    return frozenset(nums for nums in moments if not covers(moments - {nums}, nums))


def _most(sizes: Mapping[Place, int], more_sizes: Mapping[Place, int]) -> dict[Place, int]:
    places = {**sizes, **more_sizes}
    return {place: max(sizes.get(place, 0), more_sizes.get(place, 0)) for place in places}


def by_stage(sizes: Mapping[Place, int]) -> Counter[int]:
    """Return the bytes that a chunk of each stage takes."""
    by_stage = Counter[int]()
    for place, nbytes in sizes.items():
        by_stage[place.vp_stage] += nbytes
    return by_stage


# Groups that have room


def fitting(
    demand: Demand, room_bytes: int, moving_bytes: int, hidden_bytes: int = 0
) -> dict[Place, int]:
    """Return the places whose groups have room, each with the bytes that a group takes there.

    Three choices: all groups stay whole; all stay, some without bytes that recipes compute again;
    or some leave, beside room for copies. Copies that hide behind compute cost less than computing
    again, other copies cost more. If any group leaves, ``moving_bytes`` are the most bytes of
    copies, both ways together; ``hidden_bytes`` are those that a step copies while it computes.
    """
    order = _stay_order(demand)
    all_stay = _filled(demand, order, set(), room_bytes)
    hidden = set[Place]()  # the last places whose copies hide behind compute
    for place in reversed(order):
        hidden_bytes -= demand.lean[place] * demand.num_chunks[place.vp_stage]
        if hidden_bytes < 0:
            break
        hidden.add(place)
    some_leave = _filled(demand, order, hidden, room_bytes - moving_bytes)
    if len(all_stay) < len(order):
        return some_leave
    does_hide = hidden.issuperset(demand.sizes.keys() - some_leave)
    is_cheaper = demand.again_bytes(some_leave) < demand.again_bytes(all_stay)
    return some_leave if does_hide and is_cheaper else all_stay


def _stay_order(demand: Demand) -> list[Place]:
    """Return the places in the order in which their groups are given room: first of the stage with
    the fewest chunks in flight, where a byte of memory keeps most; in a stage first the group saved
    last, as backward uses it first, then halves, quarters and so on: copies of groups far apart
    have more time. See NOTE [ Chunks keep their room ].
    """
    last = dict(sorted(demand.sizes))  # position of the last group of each stage

    def rank(place: Place) -> tuple[int, int, int]:
        stage, position = place
        spread = reversed_bits(last[stage] - position, num=last[stage] + 1)
        return demand.peak_bytes({stage: 1}), stage, spread

    return sorted(demand.sizes, key=rank)


def reversed_bits(index: int, *, num: int) -> int:
    """Return a sorting key: the first of ``num`` indices are far apart (van der Corput's order)."""
    return int(f"{index:0{(num - 1).bit_length()}b}"[::-1], 2)


def _filled(
    demand: Demand, order: Sequence[Place], may_leave: Collection[Place], room_bytes: int
) -> dict[Place, int]:
    """Fill the room: first places that must stay, lean, then whole; then ``may_leave``."""
    chosen: dict[Place, int] = {}
    taken = Counter[int]()
    always = [place for place in order if place not in may_leave]
    candidates = [place for place in order if place in may_leave]
    for places, sizes in product((always, candidates), (demand.lean, demand.sizes)):
        for place in places:
            more = taken + Counter({place.vp_stage: sizes[place] - chosen.get(place, 0)})
            if demand.peak_bytes(more) <= room_bytes:
                taken, chosen[place] = more, sizes[place]
    return chosen


# Several steps


class Change(enum.Enum):
    """Change of the demand of all steps by a step."""

    NONE = enum.auto()
    MORE = enum.auto()
    LESS = enum.auto()


class History:
    """The largest demand of all steps. Once equal smaller steps repeat, it is forgotten."""

    def __init__(self) -> None:
        self.demand = self.last = Demand()
        self._num_equal, self._num_wanted = 0, NUM_EQUAL
        self._has_forgotten = False

    def add(self, step: Demand) -> Change:
        """Add a step. If a larger step comes back, twice as many equal steps are needed next time:
        otherwise each large step of a loop that mixes sizes would have no room.
        """
        self._num_equal = self._num_equal + 1 if step == self.last else 1
        self.last = step
        demand = self.demand.merged(step)
        if demand != self.demand:
            self._num_wanted *= 1 + self._has_forgotten
            self.demand, self._has_forgotten = demand, False
            return Change.MORE
        if step != demand and self._num_equal >= self._num_wanted:
            self.demand, self._has_forgotten = step, True
            return Change.LESS
        return Change.NONE
