"""Notes of copies and waits, taken where the engine times them.

    notes = CopyNotes(begin, room, lanes)
    observers.add(notes)
    ...
    notes.copies, notes.wait_notes

NOTE [ Which copy brought it ]
    A payload is known by its batch and its index there. A later batch may have the same identity:
    its own copy off the device comes first, and replaces what was known. No batch is kept, for that
    would keep its bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pp_offload._core.batch import Batch
from pp_offload._core.observer import Lap
from pp_offload._core.saved import Saved
from pp_offload._core.stopwatch import Laps, direction
from pp_offload.backends import Backend, Event, TimedEvent
from pp_offload.trace.notes import CopyNote, Room, WaitNote, Work

UNKNOWN = "waits for a disk, or for a copy from before"
"""Of a wait for what no copy was noted for."""


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
        self._left: dict[int, CopyNote] = {}
        """By batch."""

        self._came: dict[tuple[int, int], CopyNote] = {}
        """By batch and index."""

    def copied(
        self,
        lap: Lap | None,
        moved: Sequence[tuple[Batch, Sequence[int]]],
        event: Event,
        *,
        to_host: bool,
    ) -> None:
        if lap is None:
            self.is_cut = True
            return
        keys = [(id(batch), index) for batch, indices in moved for index in indices]
        left = [] if to_host else [self._left.get(id(batch)) for batch, _ in moved]
        sources = dict.fromkeys(note for note in left if note is not None)
        if not self._room.takes(1 + 3 * len(sources)):  # a flow has up to three points
            return
        label = moved[0][0].label
        note = CopyNote(label, to_host, *lap, len(keys), self.works(lap), tuple(sources))
        # With the event itself: nobody else gets its identity as long as it is here.
        self._behind[id(event)] = event, note
        self.copies.append(note)
        if to_host:
            self._left.update((id(batch), note) for batch, _ in moved)
        else:
            self._came.update(dict.fromkeys(keys, note))

    def works(self, lap: Lap) -> tuple[Work, ...]:
        """What a virtual stream said of copies that were queued just now."""
        return ()

    def waited(self, lap: Lap | None, event: Event) -> None:
        if lap is None:
            self.is_cut = True
        elif self._room.takes(1):
            note = WaitNote(self._lanes.here(), self.reason(event), lap.begin, lap.end)
            self.wait_notes.append(note)

    def reason(self, event: Event) -> str:
        """What a wait for ``event`` is called."""
        found = self._behind.get(id(event))
        if found is None:
            return UNKNOWN
        return f"waits for {found[1].label} ({direction(found[1].to_host)})"

    def first_use_of(self, saved: Saved) -> CopyNote | None:
        """The copy that brought it, if there was one, and nothing that came with it was used."""
        reload = saved.batch.back.reloads[saved.index]
        if reload is None or reload.event is None:  # it was taken back
            return None
        note = self._came.get((id(saved.batch), saved.index))
        return None if note is None or note.used is not None else note
