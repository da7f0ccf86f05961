"""Hears what one engine does, and notes when it does it on its device.

    recorder = Recorder(offloader, Room(10**6))
    recorder.begin()                 # the host waits for compute, once
    ...                              # it does not wait here
    recorder.end()                   # the host waits for all that was noted
    recorder.notes, recorder.marks

In a capture nothing runs, and nothing is noted.
"""

from __future__ import annotations

import itertools
import logging
from typing import Any

from torch import Tensor

from pp_offload._core.group import Group
from pp_offload._core.observer import Observer
from pp_offload._core.payloads import Payloads
from pp_offload._core.saved import Saved
from pp_offload._core.stopwatch import named, time_of
from pp_offload._groups.offloader import Offloader
from pp_offload.backends import TimedEvent
from pp_offload.trace.clock import VIRTUAL, Clock, is_virtual
from pp_offload.trace.copy_notes import CopyNotes, Lanes
from pp_offload.trace.disk_notes import DiskNotes
from pp_offload.trace.notes import NO_GROUP, Known, Mark, Room, Sampled, StepNote
from pp_offload.trace.sampled import Counters
from pp_offload.trace.virtual_notes import VirtualCopyNotes

logger = logging.getLogger(__name__)


class Recorder(Observer):
    """Notes what an engine does, from :meth:`begin` to :meth:`end`.

    Args:
        offloader: Of the engine.
        room: For notes. When it is full, the recorder hears no more.

    Attributes:
        clock: Of the recording; None before.
        notes: Of copies and waits.
        disk: Notes of what the threads of a disk do.
        marks: Of groups, in the order in which compute passes them on each lane.
        steps: Where they begin.
        samples: Of counters.
        drift_s: How much later the wall clock is at the end; None where there is none to compare.
    """

    def __init__(self, offloader: Offloader, room: Room) -> None:
        self.offloader = offloader
        self._observers = offloader.observers
        self.clock: Clock | None = None
        self.notes: CopyNotes | None = None
        self.marks: list[Mark] = []
        self.steps: list[StepNote] = []
        self.samples: list[Sampled] = []
        self.drift_s: float | None = None
        self.disk = DiskNotes(offloader.engine.mover.tier, room)
        self._room = room
        self._lanes = Lanes(offloader.backend)
        self._counters = Counters(offloader)
        self._numbers = itertools.count()
        self._num_on_demand = 0
        self._is_hearing = False
        self._open: dict[int, tuple[Group, int, Any]] = {}

    @property
    def is_captured(self) -> bool:
        """Whether some of it ran in a capture, and has no time."""
        return self.notes is not None and self.notes.is_cut

    def begin(self) -> bool:
        """Record from now on; False in a capture, where the time is not known."""
        backend = self.offloader.backend
        begin = time_of(backend, backend.current_stream())
        if begin is None:
            return False
        self.clock = Clock.started(backend, begin)
        if is_virtual(backend):
            self.notes = VirtualCopyNotes(begin, self._room, self._lanes, backend)
        else:
            self.notes = CopyNotes(begin, self._room, self._lanes)
        self._lanes.here()  # the stream that is live now is the first
        with self.offloader.lock:
            self._observers.add(self.notes)
            self.disk.hear()
            self._observers.add(self)
            self._is_hearing = True
        return True

    def step(self, number: int) -> None:
        """A step begins here."""
        at = self._now()
        self._ends_step()
        values = self._counters.read()
        if at is not None and self._takes(1 + len(values)):
            self.steps.append(StepNote(number, at))
            self.samples.append(Sampled(at, values))
            self._mark("over", at, -1, None)

    def _ends_step(self) -> None:
        peak_bytes = self._counters.step_peak()
        if self.steps:
            self.steps[-1].peak_bytes = peak_bytes
        self._count_on_demand()

    def _count_on_demand(self) -> None:
        num, before = self.offloader.engine.mover.counts.on_demand_reloads, self._num_on_demand
        self._num_on_demand = num
        if self.steps:
            self.steps[-1].on_demand_reloads = num - before

    def end(self) -> None:
        """Record no more, and wait until all that was noted has ended. Not in a capture."""
        if not self._room.is_full:
            self._ends_step()
        self.stop()
        at = self._now_after()
        if at is None or self.clock is None or self.notes is None:
            return
        if not self._room.is_full:  # else nobody knows until when what is open went on
            self._mark("over", at, -1, None)
        self.drift_s = self.clock.drift_s(at)
        if self.clock.kind != VIRTUAL:
            self._wait_for_all()

    def stop(self) -> None:
        """Hear no more. Twice is fine."""
        if self.notes is not None:
            with self.offloader.lock:
                self._observers.remove(self.notes)
                self._observers.remove(self)
                self._is_hearing = False
            self.disk.stop_hearing()
            if isinstance(self.notes, VirtualCopyNotes):
                self.notes.stop_hearing()
        while self._open:
            _, _, shown = self._open.popitem()[1]
            shown.__exit__(None, None, None)

    def _wait_for_all(self) -> None:
        assert self.notes is not None
        copies = [note.end for note in self.notes.copies]
        waits = [note.end for note in self.notes.wait_notes]
        uses = [note.used for note in self.notes.copies if note.used is not None]
        for event in (*copies, *waits, *uses, *(mark.at for mark in self.marks)):
            try:
                if not event.query():
                    event.synchronize()
            except Exception as failure:  # who needs the bytes is told; here it has no time
                logger.debug("a copy has no time, for it failed: %s", str(failure))

    # What the engine tells

    def opened(self, group: Group) -> None:
        number, shown = next(self._numbers), named(group.name, "forward")
        shown.__enter__()
        self._open[id(group)] = group, number, shown
        at = self._now()
        if at is not None and self._takes(1):
            self._mark("opened", at, number, group)

    def closed(self, group: Group, payloads: Payloads | None) -> None:
        found = self._open.pop(id(group), None)
        if found is not None:
            _, number, shown = found
            self._note("closed", number, group)
            shown.__exit__(None, None, None)

    def reached(self, group: Group) -> None:
        with named(group.name, "backward"):  # a point: it cannot end inside another node
            pass
        self._note("reached", -1, group)

    def used(self, saved: Saved, payload: Tensor) -> None:
        note = None if self.notes is None else self.notes.first_use_of(saved)
        if note is not None:
            note.used, note.used_on = self._now(), self._lanes.here()

    # Notes

    def _note(self, what: str, number: int, group: Group) -> None:
        """A mark, and what the counters say."""
        at = self._now()
        if at is None:
            return
        values = self._counters.read()
        if self._takes(1 + len(values)):
            self._mark(what, at, number, group)
            self.samples.append(Sampled(at, values))

    def _takes(self, num: int) -> bool:
        """Whether there is room for so much; if not, it hears no more."""
        if self._room.takes(num):
            return True
        if self._is_hearing:
            self._count_on_demand()
        self.stop()
        return False

    def _mark(self, what: str, at: TimedEvent, number: int, group: Group | None) -> None:
        known = NO_GROUP if group is None else known_of(group)
        self.marks.append(Mark(self._lanes.here(), what, at, number, known))

    def _now(self) -> TimedEvent | None:
        """Behind all that the live compute stream was given; None in a capture."""
        return None if self.notes is None else self.notes.now(self.offloader.backend)

    def _now_after(self) -> TimedEvent | None:
        """The same when nobody listens any more."""
        return time_of(self.offloader.backend, self.offloader.backend.current_stream())


def known_of(group: Group) -> Known:
    """What a span says of its group."""
    return Known(group.name, group.key, group.state, group.counts)
