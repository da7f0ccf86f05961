"""Marks that say which cases of a test are quick, slow or exhaustive."""

from __future__ import annotations

from itertools import product

import pytest
from helpers.quick import chosen, tuples

pytest_plugins = ["pytester"]


def cases(*sizes: int) -> list[dict[str, int]]:
    """The full product of parameters with so many values each."""
    return [dict(zip("abcd", values, strict=False)) for values in product(*map(range, sizes))]


@pytest.mark.parametrize("sizes", [(5, 4, 3), (3, 3), (7,), (2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_every_tuple_is_in_one_of_those_chosen(sizes: tuple[int, ...], size: int) -> None:
    every = cases(*sizes)
    indices = chosen(every, size)
    wanted = set().union(*(tuples(case, size) for case in every))
    assert set().union(*(tuples(every[index], size) for index in indices)) == wanted
    assert indices == chosen(every, size), "each worker chooses the same"
    assert size == 2 or len(indices) == max(sizes), "no more than needed"


MARKED = """
import pytest

both = pytest.mark.parametrize("a", ["x", "y", "z"]), pytest.mark.parametrize("b", [1, 2])

@both[0]
@both[1]
@pytest.mark.quick("y", "z")
def test_named(a, b): pass

@both[0]
@both[1]
@pytest.mark.parametrize("c", [1, 2])
@pytest.mark.covering(1)
def test_product(a, b, c): pass

@pytest.mark.slow
def test_slow(): pass
"""


def test_the_others_are_slow_or_exhaustive(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "from helpers.quick import mark_slow\n"
        "def pytest_collection_modifyitems(items):\n    mark_slow(items)"
    )
    pytester.makeini("[pytest]\nmarkers =\n  slow\n  exhaustive\n  quick\n  covering")
    pytester.makepyfile(MARKED)
    for expression, num in {"not slow and not exhaustive": 2 + 3, "slow": 4 + 4 + 1}.items():
        pytester.runpytest("-m", expression).assert_outcomes(passed=num, deselected=19 - num)
