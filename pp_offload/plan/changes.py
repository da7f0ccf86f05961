"""Other choices near one: of classes of equal groups, and of single groups.

    stay = stay_of(classes, (2, 0))
    for other in class_changed(stay, classes):
        ...

Which of equal groups stays hardly changes a peak, so classes are changed first: there are far fewer
of them. Where the link has too much to do it changes waits, so each group is looked at in the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

from pp_offload.plan.classes import Class, Kept

Stay = frozenset[tuple[int, int]]
"""Which groups of a rank stay: stage and position of each."""


def stay_of(classes: Sequence[Class], nums: Kept) -> Stay:
    """So many of each class, those that are saved last."""
    return frozenset(
        place for one, num in zip(classes, nums, strict=True) for place in one.places[:num]
    )


def class_changed(stay: Stay, classes: Sequence[Class]) -> Iterator[Stay]:
    """All or none of a class, one more or one less of it, or one of another in place of one."""
    for one in classes:
        yield from (stay.union(one.places), _more(stay, one), _less(stay, one))
        yield stay.difference(one.places)
    for more, less in permutations(classes, 2):
        if not stay.issuperset(more.places) and not stay.isdisjoint(less.places):
            yield _less(_more(stay, more), less)


def group_changed(stay: Stay, classes: Sequence[Class]) -> Iterator[Stay]:
    """One group more or less, or another one in place of one."""
    places = [place for one in classes for place in one.places]
    for place in places:
        yield stay ^ {place}
    for more in places:
        for less in places:
            if more not in stay and less in stay:
                yield stay ^ {more, less}


def flipped(
    kept: Sequence[Stay], ranks: Sequence[Sequence[Class]], num: int
) -> Iterator[tuple[Stay, ...]]:
    """So many groups of any ranks changed: those that stayed leave, those that left stay."""
    groups = [
        (rank, place)
        for rank, classes in enumerate(ranks)
        for one in classes
        for place in one.places
    ]
    for some in combinations(groups, num):
        yield tuple(
            stay.symmetric_difference([place for at, place in some if at == rank])
            for rank, stay in enumerate(kept)
        )


def fewer(stay: Stay, classes: Sequence[Class], num: int) -> Stay:
    """So many less of the last classes of which some stay, or none if there are no more."""
    staying = [place for one in classes for place in one.places if place in stay]
    return frozenset(staying[:-num])


def subsets(classes: Sequence[Class]) -> Iterator[Stay]:
    """All choices."""
    stays = [frozenset[tuple[int, int]]()]
    for one in classes:
        for place in one.places:
            stays += [stay | {place} for stay in stays]
    return iter(stays)


def _more(stay: Stay, one: Class) -> Stay:
    """The one that is saved last of those that leave stays."""
    return stay.union([place for place in one.places if place not in stay][:1])


def _less(stay: Stay, one: Class) -> Stay:
    """The one that is saved first of those that stay leaves."""
    return stay.difference([place for place in one.places if place in stay][-1:])
