"""A timeline of what was noted, when all of it is over.

A span needs its begin and its end: what has only one of them, or no time, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pp_offload.trace.clock import Clock
from pp_offload.trace.copy_notes import direction
from pp_offload.trace.disk_notes import on_tracks
from pp_offload.trace.events import (
    COMPUTE,
    D2H,
    H2D,
    OPERATORS,
    STEPS,
    Flow,
    Point,
    Sample,
    Span,
    Timeline,
)
from pp_offload.trace.notes import CopyNote, Mark
from pp_offload.trace.recorder import Recorder
from pp_offload.trace.virtual_notes import VirtualCopyNotes


def assembled(recorder: Recorder, rank: int, known: dict[str, Any]) -> Timeline:
    """What a recorder noted.

    Args:
        recorder: It has ended.
        rank: Whose it is.
        known: What else there is to know of it.
    """
    if recorder.clock is None:
        return Timeline(0, metadata={rank: known})
    assembly = _Assembly(recorder, recorder.clock, rank)
    return Timeline(
        recorder.clock.base_ns,
        list(assembly.spans()),
        list(assembly.samples()),
        list(assembly.flows()),
        {rank: known},
    )


@dataclass(frozen=True)
class _Assembly:
    recorder: Recorder
    clock: Clock
    rank: int

    def spans(self) -> Iterator[Span]:
        """All of them."""
        yield from self._steps()
        yield from self._forwards()
        yield from self._backwards()
        notes = self.recorder.notes
        assert notes is not None
        for copy in notes.copies:
            yield from self._copy(copy)
        for wait in notes.wait_notes:
            yield from self._span(lane_name(wait.lane), wait.name, wait.begin, wait.end, {})
        for track, done in on_tracks(self.recorder.disk.found):
            begin_s, end_s = self.clock.of_host(done.begin_s), self.clock.of_host(done.end_s)
            yield Span(self.rank, track, done.name, begin_s, end_s, {"bytes": done.nbytes})
        if isinstance(notes, VirtualCopyNotes):
            for stall in notes.stalls:
                yield Span(self.rank, COMPUTE, stall.name, stall.begin_s, stall.end_s)
            for work in notes.operators:
                yield Span(self.rank, OPERATORS, "operators", work.begin_s, work.end_s)

    def _span(
        self, track: str, name: str, begin: Any, end: Any, args: dict[str, Any]
    ) -> Iterator[Span]:
        """One, unless it has no time or takes none."""
        begin_s, end_s = self.clock.seconds(begin), self.clock.seconds(end)
        if begin_s is not None and end_s is not None and begin_s < end_s:
            yield Span(self.rank, track, name, begin_s, end_s, args)

    def _steps(self) -> Iterator[Span]:
        notes = self.recorder.steps
        ends = [note.at for note in notes[1:]]
        over = [mark.at for mark in self.recorder.marks if mark.what == "over"]
        if len(over) > len(notes):  # the recording has an end of its own
            ends.append(over[-1])
        for note, end in zip(notes, ends, strict=False):
            args = {"step": note.number, "on_demand_reloads": note.on_demand_reloads}
            if note.peak_bytes is not None:
                args["device_peak_bytes"] = note.peak_bytes
            yield from self._span(STEPS, f"step {note.number}", note.at, end, args)

    def _forwards(self) -> Iterator[Span]:
        opened: dict[int, Mark] = {}
        for mark in self.recorder.marks:
            if mark.what == "opened":
                opened[mark.number] = mark
            elif mark.what == "closed" and mark.number in opened:
                begin = opened.pop(mark.number)
                where = lane_name(begin.lane), f"{mark.group.name} (forward)"
                yield from self._span(*where, begin.at, mark.at, mark.group.args())

    def _backwards(self) -> Iterator[Span]:
        reached: dict[int, Mark] = {}
        for mark in self.recorder.marks:
            lanes = list(reached) if mark.what == "over" else [mark.lane]
            for lane in lanes:
                begin = reached.pop(lane, None)
                if begin is not None:
                    where = lane_name(lane), f"{begin.group.name} (backward)"
                    yield from self._span(*where, begin.at, mark.at, begin.group.args())
            if mark.what == "reached":
                reached[mark.lane] = mark

    def _copy(self, note: CopyNote) -> Iterator[Span]:
        name = f"{note.label} ({direction(note.to_host)})"
        args: dict[str, Any] = {"bytes": note.nbytes, "payloads": note.num_payloads}
        if not note.works:
            yield from self._span(track_of(note), name, note.begin, note.end, args)
            return
        args["busy_s"] = sum(work.end_s - work.begin_s for work in note.works)
        begin_s, end_s = note.works[0].begin_s, note.works[-1].end_s
        yield Span(self.rank, track_of(note), name, begin_s, end_s, args)

    def samples(self) -> Iterator[Sample]:
        """Of each counter, where it changes."""
        last: dict[str, int] = {}
        for one in self.recorder.samples:
            time_s = self.clock.seconds(one.at)
            for counter, nbytes in one.nbytes.items() if time_s is not None else ():
                if last.get(counter) != nbytes:
                    last[counter] = nbytes
                    yield Sample(self.rank, counter, time_s or 0.0, nbytes)

    def flows(self) -> Iterator[Flow]:
        """From each copy off the device to the copy back, and to the first use of that."""
        assert self.recorder.notes is not None
        for note in self.recorder.notes.copies:
            back = self._begin(note)
            if back is None:
                continue
            used_s = None if note.used is None else self.clock.seconds(note.used)
            used = [] if used_s is None else [Point(lane_name(note.used_on), used_s)]
            for source in note.came_from:
                left = self._begin(source)
                if left is not None:
                    yield Flow(self.rank, source.label, (left, back, *used))

    def _begin(self, note: CopyNote) -> Point | None:
        """The begin of a copy that has a span."""
        for span in self._copy(note):
            return Point(span.track, span.begin_s)
        return None


def track_of(note: CopyNote) -> str:
    """Where it is shown."""
    return D2H if note.to_host else H2D


def lane_name(lane: int) -> str:
    """The track of a compute stream."""
    return COMPUTE if lane == 0 else f"{COMPUTE} {lane + 1}"
