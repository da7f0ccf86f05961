"""Copies that may still use bytes that nobody has, noted by where these bytes are.

Whoever gets the bytes next waits for them. Each use is asked after when its own bytes are carved
anew, so a take does not pay for copies elsewhere, however many are under way.

    uses.set(one, events)          # nobody has the bytes of this range any more
    uses.unfinished([one, other])  # what to wait for before these are written
    uses.clear(one)                # somebody has them, and waits
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from pp_offload._memory.arena import Range
from pp_offload.backends import Event

Start = tuple[int, int]
"""A slab, and a first byte in it."""


@dataclass(frozen=True)
class _Span:
    """Bytes with the same uses; where they start is the key."""

    end: int
    events: tuple[Event, ...]


class Uses:
    """Spans of bytes, none of which overlap, found by bisection.

    An interrupt in the middle of a call loses no use. After one, call :meth:`mend` first.
    """

    def __init__(self) -> None:
        self._spans: dict[Start, _Span] = {}
        self._starts: list[Start] = []

    def __bool__(self) -> bool:
        return bool(self._starts)

    def set(self, one: Range, events: tuple[Event, ...]) -> None:
        """These are all uses of the bytes of a range."""
        self.clear(one)
        self._add((one.slab, one.offset), _Span(one.end, events))

    def clear(self, one: Range) -> None:
        """Forget the uses of the bytes of a range."""
        for start in self._overlapping(one):
            span = self._spans[start]
            if span.end > one.end:  # first, or an interrupt would lose it
                self._add((one.slab, one.end), span)
            if start[1] < one.offset:
                self._spans[start] = replace(span, end=one.offset)
            else:
                del self._spans[start]
                del self._starts[bisect_left(self._starts, start)]

    def unfinished(self, ranges: Iterable[Range]) -> tuple[Event, ...]:
        """The uses of these bytes that have not ended, each once."""
        spans = [self._spans[start] for one in ranges for start in self._overlapping(one)]
        found = {id(event): event for span in spans for event in span.events}
        return tuple(event for event in found.values() if not event.query())

    def events(self) -> Iterator[Event]:
        """All uses."""
        for span in self._spans.values():
            yield from span.events

    def mend(self) -> None:
        """Go on after an interrupt, which may have left a span and its own tail, or no order."""
        self._starts = sorted(self._spans)
        for start, after in pairwise(self._starts):
            span = self._spans[start]
            if start[0] == after[0] and span.end > after[1]:
                self._spans[start] = replace(span, end=after[1])

    def _add(self, start: Start, span: _Span) -> None:
        self._spans[start] = span
        insort(self._starts, start)

    def _overlapping(self, one: Range) -> list[Start]:
        """Where spans start that share bytes with a range; the first may begin before it."""
        first = bisect_right(self._starts, (one.slab, one.offset)) - 1
        last = bisect_left(self._starts, (one.slab, one.end))
        found = self._starts[max(first, 0) : last]
        return [at for at in found if at[0] == one.slab and self._spans[at].end > one.offset]
