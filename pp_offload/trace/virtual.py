"""Work of a virtual device's streams, which call ``copied`` and ``computed`` with its times.

Events would be less exact: an event between two works has the end of the first as its time, though
the host may launch the second later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pp_offload._core.observer import Lap
from pp_offload.trace.timeline import COMPUTE, OPERATORS, WAITS_FOR_OTHERS


class VirtualStreams:
    """Notes of operators and stalls, and the times of copies.

    Args:
        add: Adds a note of a track, a name, a begin and an end, and returns it.

    Attributes:
        waits: Waits of compute for copies since compute last worked, by name.
    """

    def __init__(self, add: Callable[[str, str, float, float], Any]) -> None:
        self.waits: list[tuple[str, Lap]] = []
        self._add = add
        self._operators: Any = None
        self._copies: list[tuple[float, float]] = []

    def times_of_copies(self, begin: Any, end: Any) -> tuple[Any, Any]:
        """Return begin and end of the copies since the last call, which events are around."""
        copies, self._copies = self._copies, []
        copies = [copy for copy in copies if copy[0] >= begin.time_s]  # not those of others
        return (copies[0][0], copies[-1][1]) if copies else (begin, end)

    def copied(self, ready_s: float, begin_s: float, end_s: float) -> None:
        self._copies.append((begin_s, end_s))

    def computed(self, ready_s: float, begin_s: float, end_s: float) -> None:
        """Note work of compute, and its waits before."""
        waits, self.waits = self.waits, []
        for name, lap in waits:
            begin: Any = lap.begin
            end: Any = lap.end
            wait_s, until_s = max(ready_s, begin.time_s), min(end.time_s, begin_s)
            if wait_s < until_s:
                self._stalled(WAITS_FOR_OTHERS, ready_s, wait_s)
                self._stalled(name, wait_s, until_s)
                ready_s = until_s
        self._stalled(WAITS_FOR_OTHERS, ready_s, begin_s)
        if self._operators is not None and self._operators.end == begin_s:
            self._operators.end = end_s
        elif begin_s < end_s:
            self._operators = self._add(OPERATORS, "operators", begin_s, end_s)

    def _stalled(self, name: str, begin_s: float, end_s: float) -> None:
        if begin_s < end_s:
            self._add(COMPUTE, name, begin_s, end_s)
