"""Notes of copies and waits on a virtual device, whose streams say when they work.

There an event between two works has the time at which the first one ended, though the host may
launch the second one only later. So spans are made of what the streams say, which is exact: what
they add up to is ``busy_s`` and ``stalled_s`` of the streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pp_offload._core.observer import Lap
from pp_offload.backends import Backend, Event, TimedEvent
from pp_offload.trace.copy_notes import CopyNotes, Lanes
from pp_offload.trace.notes import Room, Stall, Work

OTHER_WORK = "waits for other work"
"""Of compute, but for no copy: messages of other ranks, above all."""


class _Wait(NamedTuple):
    name: str
    begin_s: float
    end_s: float


class VirtualCopyNotes(CopyNotes):
    """Notes of one engine, while it listens to the streams of its device.

    Args:
        begin, room, lanes: As for :class:`CopyNotes`.
        backend: A virtual one.

    Attributes:
        stalls: When compute had work and waited.
        operators: When compute worked; what follows at once is one of them.
    """

    def __init__(self, begin: TimedEvent, room: Room, lanes: Lanes, backend: Backend) -> None:
        super().__init__(begin, room, lanes)
        self.stalls: list[Stall] = []
        self.operators: list[Work] = []
        self._works: list[Work] = []
        self._waits: list[_Wait] = []
        compute: Any = backend.current_stream()
        copies: Sequence[Any] = (backend.d2h, backend.h2d)
        self._heard = [(compute, self._computed), *((stream, self._worked) for stream in copies)]
        for stream, hear in self._heard:
            stream.heard = (*stream.heard, hear)

    def stop_hearing(self) -> None:
        """Of the streams. Twice is fine."""
        for stream, hear in self._heard:
            stream.heard = tuple(one for one in stream.heard if one != hear)

    def works(self, lap: Lap) -> tuple[Work, ...]:
        begin: Any = lap.begin
        works, self._works = self._works, []  # what others had copied ended before
        return tuple(work for work in works if work.begin_s >= begin.time_s)

    def waited(self, lap: Lap | None, event: Event) -> None:
        assert lap is not None, "this device has no captures"
        begin: Any = lap.begin
        end: Any = lap.end
        self._waits.append(_Wait(self.reason(event), begin.time_s, end.time_s))

    def _worked(self, ready_s: float, begin_s: float, end_s: float) -> None:
        self._works.append(Work(ready_s, begin_s, end_s))

    def _computed(self, ready_s: float, begin_s: float, end_s: float) -> None:
        """Compute works; if it had to wait, it was for what it was told to since it worked last."""
        waits, self._waits = self._waits, []
        if begin_s > ready_s:
            self._stall(ready_s, begin_s, waits)
        if end_s <= begin_s:
            return
        last = self.operators[-1] if self.operators else None
        if last is not None and last.end_s == begin_s:
            self.operators[-1] = last._replace(end_s=end_s)
        elif self._room.takes(1):
            self.operators.append(Work(ready_s, begin_s, end_s))

    def _stall(self, now_s: float, until_s: float, waits: list[_Wait]) -> None:
        for wait in waits:
            begin_s, end_s = max(now_s, wait.begin_s), min(wait.end_s, until_s)
            if begin_s < end_s:
                self._note(OTHER_WORK, now_s, begin_s)
                self._note(wait.name, begin_s, end_s)
                now_s = end_s
        self._note(OTHER_WORK, now_s, until_s)

    def _note(self, name: str, begin_s: float, end_s: float) -> None:
        if begin_s < end_s and self._room.takes(1):
            self.stalls.append(Stall(name, begin_s, end_s))
