"""Notes of what the threads of a disk tier do, by the host's clock.

notes = DiskNotes(tier, room)
notes.hear()
...
notes.stop_hearing()
on_tracks(notes.found)   # those at the same time on tracks of their own
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pp_offload._core.tiers import HostTier
from pp_offload.trace.events import DISK
from pp_offload.trace.notes import DiskNote, Room


class DiskNotes:
    """Hears the file of a tier, if it has one.

    Args:
        tier: Where batches go.
        room: For notes.

    Attributes:
        found: What was written and read, in the order in which it ended.
    """

    def __init__(self, tier: HostTier, room: Room) -> None:
        self.found: list[DiskNote] = []
        self._room = room
        self._disk = tier.disk if hasattr(tier.disk, "listeners") else None  # of somebody's own

    def hear(self) -> None:
        """From now on."""
        if self._disk is not None:
            self._disk.listeners = (*self._disk.listeners, self._note)

    def stop_hearing(self) -> None:
        """Twice is fine. What runs is not noted any more, either."""
        if self._disk is not None:
            rest = [tell for tell in self._disk.listeners if tell != self._note]
            self._disk.listeners, self._disk = tuple(rest), None

    def _note(self, name: str, nbytes: int, begin_s: float, end_s: float) -> None:
        if self._disk is not None and self._room.takes(1):
            self.found.append(DiskNote(name, nbytes, begin_s, end_s))


def on_tracks(notes: Iterable[DiskNote]) -> Iterator[tuple[str, DiskNote]]:
    """The notes with the first track on which nothing else is at that time."""
    ends_s: list[float] = []
    for note in sorted(notes, key=lambda one: one.begin_s):
        number = next((n for n, end_s in enumerate(ends_s) if end_s <= note.begin_s), len(ends_s))
        ends_s[number : number + 1] = [note.end_s]
        yield DISK if number == 0 else f"{DISK} {number + 1}", note
