"""A rank is filled with few tries, whatever its peak is made of, and never above its limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest

from pp_offload.plan.classes import Class, Kept
from pp_offload.plan.filling import LEFT_EMPTY, Filling

PeakOf = Callable[[Kept], int]

MANY = 1000


def differing(num: int) -> list[Class]:
    """Classes of one group each, largest first."""
    draw = Random(0)
    places = [(0, place) for place in range(num)]
    sizes = sorted(draw.sample(range(10_000, 90_000), num), reverse=True)
    return [Class(nbytes, (place,)) for nbytes, place in zip(sizes, places, strict=True)]


def nbytes_of(classes: Sequence[Class], kept: Kept) -> int:
    """Of all that stay."""
    return sum(one.nbytes * num for one, num in zip(classes, kept, strict=True))


def fill(filling: Filling, peak_of: PeakOf) -> tuple[Kept, int]:
    """What is found, and with how many tries."""
    num = 0
    while filling.is_trying:
        filling.told(peak_of(filling.proposal))
        num += 1
    return filling.proposal, num


@pytest.mark.parametrize("power", [0.8, 1.0, 1.3, 2.0, 8.0])
@pytest.mark.parametrize("part", [0.01, 0.3, 0.5, 0.9])
def test_many_classes_take_a_few_tries(power: float, part: float) -> None:
    classes = differing(MANY)
    total = nbytes_of(classes, (1,) * MANY)

    def peak_of(kept: Kept) -> int:
        return total + int(2 * total * (nbytes_of(classes, kept) / total) ** power)

    limit = total + int(2 * total * part)
    kept, num = fill(Filling(classes, limit, MANY), peak_of)
    assert limit * (1 - 2 * LEFT_EMPTY) <= peak_of(kept) <= limit
    assert num <= 20, num
    if power == 1.0:
        assert num <= 6, num


def test_no_more_tries_are_taken_than_there_are_and_what_is_found_fits() -> None:
    classes = differing(MANY)
    total = nbytes_of(classes, (1,) * MANY)

    def peak_of(kept: Kept) -> int:
        return int(total * (nbytes_of(classes, kept) / total) ** 8)

    found = [fill(Filling(classes, total // 2, most), peak_of) for most in range(2, 9)]
    assert [num for _, num in found] == list(range(2, 9))
    assert all(peak_of(kept) <= total // 2 for kept, _ in found)
    assert nbytes_of(classes, found[-1][0]) > nbytes_of(classes, found[0][0])


def test_each_of_a_few_classes_is_looked_at() -> None:
    """One of them is gone where the peak is."""
    classes = [Class(8, ((0, 0),)), Class(4, ((0, 1),)), Class(2, ((0, 2),)), Class(1, ((0, 3),))]
    kept, _ = fill(Filling(classes, 11, 100), lambda kept: 11 + nbytes_of(classes[:3], kept[:3]))
    assert kept == (0, 0, 0, 1)


def test_each_of_many_is_looked_at_if_that_is_asked_for() -> None:
    classes = differing(60)

    def peak_of(kept: Kept) -> int:
        return 10 + sum(kept[::2])

    in_runs, num = fill(Filling(classes, 10, 512), peak_of)
    assert sum(in_runs) < 30 and num < 20
    each, num = fill(Filling(classes, 10, 512, one_by_one=True), peak_of)
    assert each == (0, 1) * 30 and num <= 2 * 60


def test_a_larger_one_takes_the_place_of_smaller_ones() -> None:
    classes = [Class(6, ((0, 0),)), Class(5, ((0, 1), (0, 2)))]
    kept, _ = fill(Filling(classes, 10, 100), lambda kept: nbytes_of(classes, kept))
    assert kept == (1, 0), "a smaller one never takes the place of a larger one"
    kept, _ = fill(
        Filling(classes, 10, 100), lambda kept: (0, 20)[kept[0] > 0 and kept[1] == 0] + 5 * kept[1]
    )
    assert kept == (1, 2)


@pytest.mark.parametrize("num", [4, 60])
def test_some_stay_where_all_that_comes_back_needs_too_much_room(num: int) -> None:
    classes = differing(num)
    kept, _ = fill(Filling(classes, 10, 100), lambda kept: 8 if 0.2 < sum(kept) / num < 0.8 else 20)
    assert 0.2 < sum(kept) / num < 0.8


def test_where_nothing_fits_the_lowest_peak_is_found() -> None:
    classes = differing(4)
    kept, _ = fill(Filling(classes, 1, 100), lambda kept: 10 + (sum(kept) - 2) ** 2)
    assert sum(kept) == 2
