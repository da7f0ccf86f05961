"""Which cases of a test are quick, which are slow, and which are run by hand. Marks say so:

@pytest.mark.quick("late", "eager")  # quick are those with one of these among their parameters
@pytest.mark.covering(1)             # quick are so many that each value is in one of them; slow so
                                     # many more that each pair of values is; the rest is exhaustive
@pytest.mark.covering(2)             # quick are so many that each pair is; the rest is exhaustive

With both, what is quick is chosen among those that the first one names. A case that is marked
exhaustive stays so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

Tuples = set[tuple[tuple[str, Any], ...]]


def mark_slow(items: Sequence[pytest.Item], *, is_sparse: bool = False) -> None:
    """Mark the cases that are not quick; what needs a GPU is seldom run as it is.

    Args:
        items: All that may be run.
        is_sparse: Whether of every test so many cases do that each value is in one of them.
    """
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("gpu"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        quick, slow = list(filter(_has_named, cases)), cases
        if covering := cases[0].get_closest_marker("covering"):
            quick, slow = _covering(quick, *covering.args), _covering(cases, 2)
        if is_sparse and len(quick) > 1:
            quick = _covering(quick, 1)
        for case in cases:
            if case not in quick and not case.get_closest_marker("exhaustive"):
                case.add_marker(pytest.mark.slow if case in slow else pytest.mark.exhaustive)


def _covering(cases: Sequence[pytest.Item], size: int) -> list[pytest.Item]:
    values = [_values(case) for case in cases]
    return [cases[number] for number in chosen(values, size)]


def chosen(cases: Sequence[Mapping[str, Any]], size: int) -> list[int]:
    """Which, so that any values of so many parameters that meet in one case meet in one of these.

    Args:
        cases: Parameters with their values.
        size: How many parameters.
    """
    indices: list[int] = []
    seen = Tuples()
    uncovered = {index: tuples(case, size) for index, case in enumerate(cases)}
    while uncovered:
        best = max(uncovered, key=lambda index: len(uncovered[index] - seen))
        if uncovered[best] <= seen:
            break
        indices.append(best)
        seen |= uncovered.pop(best)
    return indices


def tuples(case: Mapping[str, Any], size: int) -> Tuples:
    """The values of each so many of its parameters."""
    return set(combinations(sorted(case.items()), min(size, len(case))))


def _values(case: pytest.Item) -> Mapping[str, Any]:
    """Of whatever kind they are, all cases are given the same ones."""
    params = case.callspec.params  # type: ignore[attr-defined]
    return {name: _key(value) for name, value in params.items()}


def _key(value: object) -> object:
    return value if isinstance(value, str | int | float) else id(value)


def _has_named(case: pytest.Item) -> bool:
    marks = list(case.iter_markers("quick"))
    if not marks or case.get_closest_marker("emulated"):  # of these there are few anyway
        return True
    callspec = getattr(case, "callspec", None)
    values = () if callspec is None else callspec.params.values()
    names = [value for value in values if isinstance(value, str | int)]
    return all(any(name in names for name in mark.args) for mark in marks)
