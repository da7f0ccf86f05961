"""Marks that say which cases of a test are quick, slow or exhaustive."""

from __future__ import annotations

from itertools import product

import pytest
from helpers.quick import chosen, tuples


@pytest.mark.parametrize("sizes", [(5, 4, 3), (3, 3), (7,), (2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_every_tuple_is_in_one_of_those_chosen(sizes: tuple[int, ...], size: int) -> None:
    every = [dict(zip("abcd", values, strict=False)) for values in product(*map(range, sizes))]
    indices = chosen(every, size)
    wanted = set().union(*(tuples(case, size) for case in every))
    assert set().union(*(tuples(every[index], size) for index in indices)) == wanted
    assert indices == chosen(every, size), "each worker chooses the same"
    assert size == 2 or len(indices) == max(sizes), "no more than needed"
