"""Notes of copies and waits, taken where the engine times them.

    notes = CopyNotes(begin, room, lanes)
    stopwatch.add(notes)
    ...
    notes.copies, notes.wait_notes

NOTE [ Which copy brought it ]
    A payload is known by its block and its place there, which do not change while its ticket lives.
    A later block may have the same identity: its own copy off the device comes first, and replaces
    what was known. No ticket is kept, for that would keep its bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch.profiler import record_function

from pp_offload._common.torch_private import is_profiling
from pp_offload._transfer.stopwatch import Lap, Laps
from pp_offload._transfer.ticket import Ticket
from pp_offload.backends import Backend, Event, TimedEvent
from pp_offload.trace.notes import CopyNote, Room, WaitNote, Work

UNKNOWN = "waits for a disk, or for a copy from before"
"""Of a wait for what no copy was noted for."""

Key = tuple[int, int]
"""Of a payload. See NOTE [ Which copy brought it ]."""


class Lanes:
    """Numbers for compute streams: the one that is seen first is 0.

    Where the device is the host, each thread is a stream.

    Args:
        backend: Has them.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._seen: list[object] = []

    def here(self) -> int:
        """That of the live stream of the calling thread."""
        backend, seen = self._backend, self._seen
        lane = threading.get_ident() if backend.is_host else backend.current_stream()
        if lane not in seen:
            seen.append(lane)
        return seen.index(lane)


class CopyNotes(Laps):
    """Notes of one engine.

    Args:
        begin: On compute, where the recording begins.
        room: For notes.
        lanes: Of the compute streams.

    Attributes:
        copies: In the order in which they were queued.
        wait_notes: Of compute, for copies.
    """

    def __init__(self, begin: TimedEvent, room: Room, lanes: Lanes) -> None:
        super().__init__(begin)
        self.copies: list[CopyNote] = []
        self.wait_notes: list[WaitNote] = []
        self._room = room
        self._lanes = lanes
        self._behind: dict[int, tuple[Event, CopyNote]] = {}
        self._left: dict[Key, CopyNote] = {}
        self._came: dict[Key, CopyNote] = {}

    def queueing(self, label: str, *, to_host: bool) -> AbstractContextManager[object] | None:
        return named(label, direction(to_host))

    def copied(self, lap: Lap, tickets: Sequence[Ticket], event: Event, *, to_host: bool) -> None:
        keys = [_key(ticket) for ticket in tickets]
        found = [] if to_host else [self._left.get(key) for key in keys]
        sources = dict.fromkeys(one for one in found if one is not None)
        if not self._room.takes(1 + 3 * len(sources)):  # a flow has up to three points
            return
        note = CopyNote(tickets[0].label, to_host, *lap, len(tickets), self.works(), tuple(sources))
        # With the event itself: nobody else gets its identity as long as it is here.
        self._behind[id(event)] = event, note
        self.copies.append(note)
        (self._left if to_host else self._came).update(dict.fromkeys(keys, note))

    def works(self) -> tuple[Work, ...]:
        """What a virtual stream said of the copies that were queued last."""
        return ()

    def waited(self, lap: Lap, event: Event) -> None:
        if self._room.takes(1):
            note = WaitNote(self._lanes.here(), self.reason(event), lap.begin, lap.end)
            self.wait_notes.append(note)

    def reason(self, event: Event) -> str:
        """What a wait for ``event`` is called."""
        found = self._behind.get(id(event))
        if found is None:
            return UNKNOWN
        return f"waits for {found[1].label} ({direction(found[1].to_host)})"

    def take_back(self, ticket: Ticket) -> None:
        """It is given out without a copy."""
        self._came.pop(_key(ticket), None)

    def first_use_of(self, ticket: Ticket) -> CopyNote | None:
        """The copy that brought it, if nothing that came with it was used before."""
        note = self._came.get(_key(ticket))
        return None if note is None or note.used is not None else note


def direction(to_host: bool) -> str:
    """As names say it."""
    return "offload" if to_host else "reload"


def named(label: str, what: str) -> record_function | None:
    """What shows this name in ``torch.profiler`` while it is entered; None if that does not run."""
    if not is_profiling():
        return None
    return record_function(f"{label} ({what})")


def _key(ticket: Ticket) -> Key:
    return id(ticket.block), ticket.begin
