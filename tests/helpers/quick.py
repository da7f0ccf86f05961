"""Which cases of a test are quick, which are slow, and which are run by hand.

Quick are so many cases that each value of each parameter is in one of them; slow are the others. Of
the promises, in tests/core, all cases are quick. Marks say what else:

@pytest.mark.quick("late", "eager")  # quick only with one of these among the parameters
@pytest.mark.covering(1)             # slow are so many that each pair of values is in one of them;
                                     # the rest is exhaustive
@pytest.mark.covering(2)             # quick are so many that each pair is; the rest is exhaustive

Parameters that one mark gives together count as one. A case that is marked slow or exhaustive stays
so.
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

    With ``is_sparse``, each value in one case is enough, whatever marks say.
    """
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("gpu"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        quick, slow = [case for case in cases if _may_be_quick(case)], cases
        if covering := cases[0].get_closest_marker("covering"):
            quick, slow = _covering(quick, *covering.args), _covering(cases, 2)
        elif not cases[0].get_closest_marker("core"):
            quick = _covering(quick, 1)
        if is_sparse:
            quick = _covering(quick, 1)
        for case in cases:
            if case not in quick and not _is_marked(case):
                case.add_marker(pytest.mark.slow if case in slow else pytest.mark.exhaustive)


def _covering(cases: Sequence[pytest.Item], size: int) -> list[pytest.Item]:
    if len(cases) < 2:
        return list(cases)
    values = [_values(case) for case in cases]
    return [cases[number] for number in chosen(values, size)]


def chosen(cases: Sequence[Mapping[str, Any]], size: int) -> list[int]:
    """Which, so that any values of ``size`` parameters that meet in a case meet in one of these."""
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
    values = {n: v if isinstance(v, str | int | float) else id(v) for n, v in params.items()}
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else list(mark.args[0])
        if len(names) > 1:
            values[str(names)] = tuple(values.pop(name.strip()) for name in names)
    return values


def _is_marked(case: pytest.Item) -> bool:
    return any(case.get_closest_marker(name) for name in ("slow", "exhaustive"))


def _may_be_quick(case: pytest.Item) -> bool:
    if _is_marked(case):
        return False
    marks = list(case.iter_markers("quick"))
    if not marks or case.get_closest_marker("emulated"):  # of these there are few anyway
        return True
    callspec = getattr(case, "callspec", None)
    values = () if callspec is None else callspec.params.values()
    names = [value for value in values if isinstance(value, str | int)]
    return all(any(name in names for name in mark.args) for mark in marks)
