"""Sets of times: what one has, two have in common, or one has without the other.

merged([(0, 2), (1, 3)])             # [(0, 3)]
common([(0, 3)], [(1, 2), (5, 6)])   # [(1, 2)]
without([(0, 3)], [(1, 2)])          # [(0, 1), (2, 3)]
"""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]
"""Its begin and its end."""


def merged(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """In order, without overlaps; those that are at most ``gap`` apart are one."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def common(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """When both are."""
    found: list[Interval] = []
    ours, theirs = merged(left), merged(right)
    i = j = 0
    while i < len(ours) and j < len(theirs):
        begin, end = max(ours[i][0], theirs[j][0]), min(ours[i][1], theirs[j][1])
        if begin < end:
            found.append((begin, end))
        if ours[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """When the first is and the second is not."""
    ours = merged(left)
    if not ours:
        return []
    theirs = merged(right)
    ends = [ours[0][0], *(time for one in theirs for time in one), ours[-1][1]]
    gaps = [(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b]
    return common(ours, gaps)


def total(intervals: Iterable[Interval]) -> float:
    """How long that is."""
    return sum(end - begin for begin, end in merged(intervals))
