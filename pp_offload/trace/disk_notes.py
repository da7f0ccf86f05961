"""Notes of what the threads of a disk tier do, by the host's clock.

notes = DiskNotes(transfer, room)
notes.hear()
...
notes.stop_hearing()
on_tracks(notes.found)   # those at the same time on tracks of their own
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pp_offload._transfer.engine import TransferEngine
from pp_offload.trace.events import DISK
from pp_offload.trace.notes import DiskNote, Room


class DiskNotes:
    """Hears the files of an engine's tiers.

    Args:
        transfer: The engine.
        room: For notes.

    Attributes:
        found: What was written and read, in the order in which it ended.
    """

    def __init__(self, transfer: TransferEngine, room: Room) -> None:
        self.found: list[DiskNote] = []
        self._room = room
        disks = [getattr(tier, "disk", None) for tier in transfer.tiers]
        self._files: list[Any] = [disk for disk in disks if told_by(disk) is not None]

    def hear(self) -> None:
        """From now on."""
        for file in self._files:
            name = told_by(file) or ""
            setattr(file, name, (*getattr(file, name), self._note))

    def stop_hearing(self) -> None:
        """Twice is fine. What runs is not noted any more, either."""
        for file in self._files:
            name = told_by(file) or ""
            setattr(file, name, tuple(tell for tell in getattr(file, name) if tell != self._note))
        self._files = []

    def _note(self, name: str, nbytes: int, begin_s: float, end_s: float) -> None:
        if self._files and self._room.takes(1):
            self.found.append(DiskNote(name, nbytes, begin_s, end_s))


def told_by(file: object) -> str | None:
    """Where a file has those whom it tells: the core's, or until the switch the old engine's."""
    return next((name for name in ("listeners", "heard") if hasattr(file, name)), None)


def on_tracks(notes: Iterable[DiskNote]) -> Iterator[tuple[str, DiskNote]]:
    """The notes with the first track on which nothing else is at that time."""
    ends_s: list[float] = []
    for note in sorted(notes, key=lambda one: one.begin_s):
        number = next((n for n, end_s in enumerate(ends_s) if end_s <= note.begin_s), len(ends_s))
        ends_s[number : number + 1] = [note.end_s]
        yield DISK if number == 0 else f"{DISK} {number + 1}", note
