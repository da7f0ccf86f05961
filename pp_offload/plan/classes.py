"""Groups of a rank by how many bytes they have, and in which order they are to stay.

    classes = classes_of(tapes)  # equal groups together, largest first
    filling = Filling(classes, limit_bytes, most_tries)
    filling = Filling(spread_out(classes), limit_bytes, most_tries)

NOTE [ Spread out ]
    The link works all the time where what leaves is everywhere in a forward, between groups that
    stay. If all that leaves is saved at once, the link has too much to do, and then nothing. So a
    number of groups is taken that are about as far from each other as can be, for any number of
    them: by van der Corput's sequence, the bits of their positions reversed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from pp_offload.plan.tape import RankTapes

Kept = tuple[int, ...]
"""How many groups of each class stay on a rank: of equal ones those that are saved last."""

T = TypeVar("T")


class Class(NamedTuple):
    """Groups of a rank that are equal."""

    nbytes: int
    places: tuple[tuple[int, int], ...]
    """By stage and position, last saved first."""


def classes_of(tapes: RankTapes) -> list[Class]:
    """Of a rank's groups that have something to move, largest first."""
    places: defaultdict[tuple[int, int, str], list[tuple[int, int]]] = defaultdict(list)
    for stage, tape in tapes.stages.items():
        for position, group in enumerate(tape.groups):
            if group.payloads:
                places[tape.nbytes(group), stage, group.name].append((stage, position))
    return [Class(key[0], tuple(places[key][::-1])) for key in sorted(places, reverse=True)]


def num_groups(classes: Sequence[Class]) -> int:
    """Of all of them together."""
    return sum(len(one.places) for one in classes)


def spread_out(classes: Sequence[Class]) -> list[Class]:
    """Each group by itself, in an order in which the first ones are far from each other, however
    many that are. See NOTE [ Spread out ].
    """
    groups = [(place, one.nbytes) for one in classes for place in one.places]
    last_first = sorted(groups, reverse=True)
    return [Class(nbytes, (place,)) for place, nbytes in reversed_bits(last_first)]


def reversed_bits(items: Sequence[T]) -> list[T]:
    """The same in the order of the reversed bits of their positions: 0, 4, 2, 6, 1, 5, 3, 7."""
    num_bits = (len(items) - 1).bit_length()
    return [
        items[index]
        for index in sorted(range(len(items)), key=lambda index: _reversed(index, num_bits))
    ]


def _reversed(index: int, num_bits: int) -> int:
    return int(f"{index:0{num_bits}b}"[::-1], 2)


def with_num(kept: Kept, number: int, num: int) -> Kept:
    """The same but for how many of one class stay."""
    return (*kept[:number], num, *kept[number + 1 :])


def with_more(kept: Kept, numbers: Sequence[int]) -> Kept:
    """The same with one more of each of these classes, as often as it is named."""
    nums = list(kept)
    for number in numbers:
        nums[number] += 1
    return tuple(nums)
