"""Which parameters share memory.

One may lie over several others, as a flat parameter does. So in the order of addresses each is
compared to the one before it that goes furthest, and not to its neighbour.

    overlapping(Span(p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in parameters)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, order=True, slots=True)
class Span:
    """Where a parameter's data are."""

    begin: int
    """Address of the first byte."""

    end: int
    """Address behind the last byte."""

    name: str
    """Of the parameter."""


def overlapping(spans: Iterable[Span]) -> list[tuple[str, str]]:
    """Pairs of names that share memory. Whatever shares memory is in a pair; not every pair is."""
    ordered = sorted(spans)
    furthest = accumulate(ordered, _further)
    return [
        (before.name, one.name)
        for before, one in zip(furthest, ordered[1:], strict=False)
        if one.begin < before.end
    ]


def _further(one: Span, other: Span) -> Span:
    return one if one.end >= other.end else other
