"""Choices near one: of classes first, of single groups, and of several at a time."""

from __future__ import annotations

from pp_offload.plan.changes import (
    Stay,
    class_changed,
    fewer,
    flipped,
    group_changed,
    stay_of,
    subsets,
)
from pp_offload.plan.classes import Class

LARGE = Class(8, ((0, 5), (0, 3), (0, 1)))
SMALL = Class(2, ((0, 4), (0, 2)))
CLASSES = [LARGE, SMALL]


def stays(*positions: int) -> Stay:
    """Groups of the one stage that there is."""
    return frozenset((0, position) for position in positions)


def test_of_equal_groups_those_saved_last_stay() -> None:
    assert stay_of(CLASSES, (2, 1)) == stays(5, 3, 4)
    assert stay_of(CLASSES, (0, 2)) == stays(4, 2)


def test_a_class_is_changed_by_all_by_one_or_for_another() -> None:
    found = list(class_changed(stays(3, 4), CLASSES))
    alone = [stays(5, 3, 1, 4), stays(5, 3, 4), stays(4), stays(4)]
    alone += [stays(3, 4, 2), stays(3, 4, 2), stays(3), stays(3)]
    assert found == [*alone, stays(5, 3), stays(4, 2)]


def test_no_class_takes_the_place_of_one_of_which_none_stays() -> None:
    alone = 4 * len(CLASSES)
    assert list(class_changed(stays(5, 3, 1), CLASSES))[alone:] == [stays(5, 3, 4)]
    assert list(class_changed(stays(5, 3, 1, 4, 2), CLASSES))[alone:] == []


def test_each_group_is_changed_and_each_takes_the_place_of_each() -> None:
    found = list(group_changed(stays(3, 4), CLASSES))
    each = [stays(3, 4, 5), stays(4), stays(1, 3, 4), stays(3), stays(2, 3, 4)]
    swapped = [stays(5, 4), stays(3, 5), stays(1, 4), stays(3, 1), stays(2, 4), stays(3, 2)]
    assert found == [*each, *swapped]


def test_several_groups_are_changed_at_a_time_on_any_ranks() -> None:
    ranks = [[SMALL], [Class(4, ((1, 0),))]]
    kept = [stays(4), frozenset({(1, 0)})]
    nothing: Stay = frozenset()
    assert list(flipped(kept, ranks, 2)) == [
        (stays(2), kept[1]),
        (nothing, nothing),
        (stays(4, 2), nothing),
    ]
    assert list(flipped(kept, ranks, 3)) == [(stays(2), nothing)]


def test_fewer_are_without_the_first_saved_of_the_smallest() -> None:
    assert fewer(stays(5, 3, 4, 2), CLASSES, 1) == stays(5, 3, 4)
    assert fewer(stays(5, 3), CLASSES, 1) == stays(5)
    assert fewer(stays(5, 3, 4, 2), CLASSES, 3) == stays(5)
    assert fewer(stays(5, 4), CLASSES, 8) == stays()
    assert fewer(stays(), CLASSES, 1) == stays()


def test_all_choices_are_all_subsets() -> None:
    found = list(subsets(CLASSES))
    assert len(found) == len(set(found)) == 2**5
    assert set(found) >= {stays(), stays(1), stays(5, 3, 1, 4, 2)}
