"""Which cases of a test are not slow. A test may say so with a mark:

@pytest.mark.quick("late", "eager")  # those with one of these among their parameters
@pytest.mark.covering(2)             # so many that every pair of parameters is in one of them

With both, those of the second are chosen among those of the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

Tuples = set[tuple[tuple[str, Any], ...]]


def mark_slow(items: Sequence[pytest.Item]) -> None:
    """Mark all other cases of such tests; those that need a GPU are seldom run as it is."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("gpu"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        kept = [case for case in cases if _has_named(case)]
        if covering := cases[0].get_closest_marker("covering"):
            values = [_values(case) for case in kept]
            kept = [kept[number] for number in chosen(values, *covering.args)]
        for case in cases:
            if case not in kept:
                case.add_marker(pytest.mark.slow)


def chosen(cases: Sequence[Mapping[str, Any]], size: int) -> list[int]:
    """Which, so that any values of so many parameters that meet in one case meet in one of these.

    Args:
        cases: Parameters with their values.
        size: How many parameters.
    """
    found: list[int] = []
    seen = Tuples()
    left = {index: tuples(case, size) for index, case in enumerate(cases)}
    while left:
        best = max(left, key=lambda index: len(left[index] - seen))
        if left[best] <= seen:
            break
        found.append(best)
        seen |= left.pop(best)
    return found


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
