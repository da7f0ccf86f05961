"""Orders of groups: any number of the first ones is everywhere."""

from __future__ import annotations

import pytest

from pp_offload.plan.classes import Class, num_groups, reversed_bits, spread_out, with_more


def test_bits_are_reversed() -> None:
    assert reversed_bits(range(8)) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert reversed_bits("abc") == ["a", "c", "b"]
    assert reversed_bits([1]) == [1] and reversed_bits([]) == []


@pytest.mark.parametrize("num", [8, 60, 1000])
def test_the_first_ones_are_far_from_each_other(num: int) -> None:
    order = [
        one.places[0][1]
        for one in spread_out([Class(1, tuple((0, place) for place in range(num))[::-1])])
    ]
    assert sorted(order) == list(range(num)) and order[0] == num - 1
    for some in (num // 4, num // 2, num - 1):
        first = sorted(order[:some])
        gaps = [later - one for one, later in zip(first, first[1:], strict=False)]
        assert max(gaps) <= 4 * num / some


def test_each_group_is_then_a_class() -> None:
    classes = [Class(8, ((1, 2), (0, 0))), Class(2, ((0, 1),))]
    assert num_groups(classes) == 3
    assert spread_out(classes) == [Class(8, ((1, 2),)), Class(8, ((0, 0),)), Class(2, ((0, 1),))]


def test_one_more_of_each_that_is_named() -> None:
    assert with_more((0, 1, 2), [2, 0, 2]) == (1, 1, 4)
