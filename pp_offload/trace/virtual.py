"""Listener of a virtual device's streams, which report each piece of work with exact times.

Events would be less exact: an event between two works has the end of the first as its time, though
the host may launch the second later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pp_offload._core.observer import Lap
from pp_offload.trace.notes import Note
from pp_offload.trace.timeline import COMPUTE, OPERATORS, WAITS_FOR_OTHERS


class VirtualStreams:
    """Notes of operators and stalls, and the exact times of copies.

    Args:
        add: Adds a note of a track, a name, a begin and an end.
        backend: A virtual device.

    Attributes:
        waits: Waits of compute for copies since compute last worked, by name.
    """

    def __init__(self, add: Callable[[str, str, float, float], Note | None], backend: Any) -> None:
        self.waits: list[tuple[str, Lap]] = []
        self._add = add
        self._operators: Note | None = None
        self._works: list[tuple[float, float]] = []
        copies = (backend.d2h, self._copied), (backend.h2d, self._copied)
        self._calls = ((backend.current_stream(), self._computed), *copies)
        for stream, call in self._calls:
            stream.listeners = (*stream.listeners, call)

    def stop(self) -> None:
        """Stop listening. A second call does nothing."""
        for stream, call in self._calls:
            stream.listeners = tuple(listener for listener in stream.listeners if listener != call)

    def fit(self, note: Note) -> None:
        """Set the times of a note to those of the copies since the last call."""
        works, self._works = self._works, []
        works = [work for work in works if work[0] >= note.begin.time_s]  # not those of others
        if works:
            note.begin, note.end = works[0][0], works[-1][1]

    def _copied(self, ready_s: float, begin_s: float, end_s: float) -> None:
        self._works.append((begin_s, end_s))

    def _computed(self, ready_s: float, begin_s: float, end_s: float) -> None:
        """Note work of compute, and its wait before."""
        waits, self.waits = self.waits, []
        for name, lap in waits:
            begin: Any = lap.begin
            end: Any = lap.end
            wait_s, until_s = max(ready_s, begin.time_s), min(end.time_s, begin_s)
            if wait_s < until_s:
                self._span(COMPUTE, WAITS_FOR_OTHERS, ready_s, wait_s)
                self._span(COMPUTE, name, wait_s, until_s)
                ready_s = until_s
        self._span(COMPUTE, WAITS_FOR_OTHERS, ready_s, begin_s)
        if self._operators is not None and self._operators.end == begin_s:
            self._operators.end = end_s
        elif begin_s < end_s:
            self._operators = self._span(OPERATORS, "operators", begin_s, end_s)

    def _span(self, track: str, name: str, begin_s: float, end_s: float) -> Note | None:
        return self._add(track, name, begin_s, end_s) if begin_s < end_s else None
