"""Recording of a rank: notes of when groups, copies and waits run on the device.

    recorder = Recorder(manager, rank, steps, facts, ended)
    ...                                 # the host waits for compute once, when recording starts
    recorder.end()                      # the host waits for all events of the notes
    recorder.timeline

In a capture nothing runs, and nothing is noted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor

from pp_offload._common.processes import logger_of
from pp_offload._core.group import Group
from pp_offload._core.observer import Lap, Moved, Observer
from pp_offload._core.payloads import Payloads
from pp_offload._core.saved import Saved
from pp_offload._core.stopwatch import direction, time_of
from pp_offload._groups.manager import Manager
from pp_offload._groups.offloader import Offloader
from pp_offload.backends import Event
from pp_offload.errors import NotWhileCapturingError
from pp_offload.trace import timeline as tl
from pp_offload.trace.notes import Clock, Note, Reading, flow_of, samples_of, spans_of, spread
from pp_offload.trace.timeline import Timeline
from pp_offload.trace.virtual import VirtualStreams

logger = logger_of(__name__)


class Recorder(Observer):
    """Recording of a rank. It follows its manager to the engine that ``configure()`` makes.

    Args:
        manager: Manager to record.
        rank: Number of the rank.
        steps: Steps to record; None for all.
        facts: Metadata of the rank, to which the recorder adds its own.
        ended: Called when the last of ``steps`` is over.

    Attributes:
        timeline: Timeline of the rank; None while recording.
    """

    def __init__(
        self,
        manager: Manager,
        rank: int,
        steps: range | None,
        facts: dict[str, Any],
        ended: Callable[[], None],
    ) -> None:
        self.timeline: Timeline | None = None
        self._manager, self._rank, self._steps, self._ended = manager, rank, steps, ended
        self._facts, self._step = facts | {"began_anew": False}, -1
        self._follow(manager.offloader)
        manager.on_begin = (*manager.on_begin, self._begin)
        if steps is None:
            self._start()

    def _follow(self, offloader: Offloader) -> None:
        """Begin an empty recording of this engine."""
        self._offloader, self._backend = offloader, offloader.backend
        self._clock: Clock | None = None
        self._notes: list[Note] = []
        self._is_cut = False  # whether a capture ran, which has no times
        self._room = self._facts["max_events"]  # below 0 when recording stopped at the limit
        self._counters, self._copies = Counters(offloader), Copies()
        self._virtual: VirtualStreams | None = None
        self._disk: Any = None
        self._streams: list[object] = []
        self._open: dict[int, tuple[Group, Note]] = {}  # with the group, which keeps its id
        self._running: dict[str, Note] = {}  # by track: the step, and the last group of backward

    def _begin(self) -> None:
        """Begin a step, or follow the manager to another engine."""
        steps = self._steps
        if self._offloader is not self._manager.offloader:
            self._stop()
            if self._notes:
                self._facts["began_anew"] = True
                logger.warning("configure() was called while a trace ran: it begins anew")
            self._follow(self._manager.offloader)
            return
        self._step += 1
        if steps is None or self._step in steps:
            self._start()
            self._note_step()
        elif self._step >= steps.stop and not self._backend.is_capturing:
            self.end()
            self._ended()

    def _start(self) -> None:
        """Start, unless a graph is captured. A second call does nothing."""
        begin = self._now()
        if begin is None or self._clock is not None:
            return
        self._clock = Clock(self._backend, begin)
        self._track()  # the current stream is the first
        with self._offloader.lock:
            if self._clock.is_virtual:
                self._virtual = VirtualStreams(self._add, self._backend)
            disk = self._offloader.engine.mover.tier.disk
            if hasattr(disk, "listeners"):
                self._disk = disk
                disk.listeners = (*disk.listeners, self._disk_worked)
            self._offloader.observers.add(self)

    def _stop(self) -> None:
        """Stop to observe. A second call does nothing."""
        with self._offloader.lock:
            self._offloader.observers.remove(self)
            if self._disk is not None:
                listeners = [call for call in self._disk.listeners if call != self._disk_worked]
                self._disk.listeners = tuple(listeners)
            if self._virtual is not None:
                self._virtual.stop()
        self._open.clear()

    def _note_step(self) -> None:
        """End the last step, and begin the next."""
        at = self._now()
        if at is not None and self._clock is not None:
            self._end_step(at)
            note = self._add(tl.STEPS, f"step {self._step}", at, step=self._step)
            if note is not None:
                self._running[tl.STEPS] = note
            self._read(at)

    def _end_step(self, at: Any) -> None:
        facts = self._counters.end_step()
        if tl.STEPS in self._running:
            self._running[tl.STEPS].args |= facts
        for note in self._running.values() if self._room >= 0 else ():
            note.end = at
        self._running.clear()

    def end(self) -> None:
        """Stop, wait for all events of the notes, and make the timeline. Twice is once.

        Raises:
            NotWhileCapturingError: A graph is captured, where no event can be waited for.
        """
        if self.timeline is not None:
            return
        manager, clock, is_full = self._manager, self._clock, self._room < 0
        manager.on_begin = tuple(call for call in manager.on_begin if call != self._begin)
        self._stop()
        if clock is not None and self._backend.is_capturing:
            raise NotWhileCapturingError(
                "a trace ends while a graph is captured, and no event can be asked for its time; "
                "leave its block after the capture"
            )
        self.timeline = Timeline(0) if clock is None else self._timeline(clock)
        if is_full:
            logger.warning(
                "a trace has its %d events, and what came then is missing; ask for fewer steps, or "
                "for more events",
                self._facts["max_events"],
            )
        self.timeline.metadata[self._rank] = self._facts | {
            "device": self._backend.name,
            "clock": None if clock is None else clock.kind,
            "steps": [note.args["step"] for note in self._notes if note.track == tl.STEPS],
            "is_truncated": is_full,
            "has_captures": self._is_cut,
        }

    def _timeline(self, clock: Clock) -> Timeline:
        self._end_step(self._now())
        for note in self._notes if not clock.is_virtual else ():
            for at in (note.begin, note.end):
                with suppress(Exception):  # a failed copy is reported where its bytes are used
                    at.synchronize()
        disk = [note for note in self._notes if note.track == tl.DISK]
        notes = [note for note in self._notes if note.track != tl.DISK]
        spans = spans_of([*notes, *spread(disk, clock)], clock, rank=self._rank)
        flows = [
            flow_of(spans[source], spans[back], back.used, clock)
            for source, back in self._copies.pairs
            if source in spans and back in spans
        ]
        samples = list(samples_of(self._counters.readings, clock, rank=self._rank))
        return Timeline(clock.base_ns, list(spans.values()), samples, flows)

    # Calls of the engine

    def opened(self, group: Group) -> None:
        track, at = self._mark()
        note = self._add(track, f"{group.name} (forward)", at)
        if note is not None:
            self._open[id(group)] = group, note

    def closed(self, group: Group, payloads: Payloads | None) -> None:
        if id(group) in self._open:
            _, note = self._open.pop(id(group))
            note.end, note.args, note.counts = self._mark()[1], _facts(group), group.counts
            self._read(note.end)

    def reached(self, group: Group) -> None:
        track, at = self._mark()
        note = self._add(track, f"{group.name} (backward)", at, **_facts(group))
        if note is not None:
            note.counts, self._running[track] = group.counts, note
        self._read(at)

    def copied(self, lap: Lap | None, moved: Moved, event: Event, *, to_host: bool) -> None:
        track, name = tl.D2H if to_host else tl.H2D, f"{moved[0][0].label} ({direction(to_host)})"
        num = sum(len(indices) for _, indices in moved)
        begin, end, nbytes = lap or (None, None, 0)
        note = self._add(track, name, begin, end, bytes=nbytes, payloads=num)
        if note is not None:
            if self._virtual is not None:
                self._virtual.fit(note)
            if self._takes(0 if to_host else 3 * len(moved)):  # points of flows
                self._copies.add(note, moved, event)

    def waited(self, lap: Lap | None, event: Event) -> None:
        name = self._copies.name_of_wait(event)
        if self._virtual is not None and lap is not None:
            self._virtual.waits.append((name, lap))
        else:
            begin, end, _ = lap or (None, None, 0)
            self._add(self._track(), name, begin, end)

    def used(self, saved: Saved, payload: Tensor) -> None:
        note = self._copies.first_use(saved)
        if note is not None:
            note.used = self._track(), self._now()

    def _disk_worked(self, name: str, nbytes: int, begin_s: float, end_s: float) -> None:
        if self._room > 0:  # does not stop, for which a thread of the disk would need the lock
            self._room -= 1
            self._notes.append(Note(tl.DISK, name, begin_s, end_s, {"bytes": nbytes}))

    # Notes

    def _add(self, track: str, name: str, begin: Any, end: Any = None, **args: Any) -> Note | None:
        """Add a note, and return it; None in a capture, and at the limit."""
        self._is_cut = self._is_cut or begin is None
        if begin is None or not self._takes(1):
            return None
        note = Note(track, name, begin, end, args)
        self._notes.append(note)
        return note

    def _takes(self, num: int) -> bool:
        self._room = -1 if self._room < num else self._room - num
        if self._room < 0:
            self._stop()
        return self._room >= 0

    def _mark(self) -> tuple[str, Any]:
        """Return the compute track and an event there, which ends the last group of backward."""
        track, at = self._track(), self._now()
        if track in self._running:
            self._running.pop(track).end = at
        return track, at

    def _now(self) -> Any:
        """Record an event on the live compute stream; None in a capture."""
        return time_of(self._backend, self._backend.current_stream())

    def _read(self, at: Any) -> None:
        if at is not None and self._takes(len(values := self._counters.read())):
            self._counters.readings.append((at, values))

    def _track(self) -> str:
        """Name the track of the live compute stream; of the thread if the host is the device."""
        backend, streams = self._backend, self._streams
        stream = threading.get_ident() if backend.is_host else backend.current_stream()
        if stream not in streams:
            streams.append(stream)
        number = streams.index(stream)
        return f"{tl.COMPUTE} {number + 1}" if number else tl.COMPUTE


def _facts(group: Group) -> dict[str, Any]:
    """Make the arguments of a group's spans: a note of the group would keep its tensors."""
    state = {"state": group.state.value}
    if group.key is None:
        return state
    (vp_stage, microbatch), position = group.key
    return {"microbatch": microbatch, "vp_stage": vp_stage, "position": position} | state


class Copies:
    """Notes of the copies of each batch to the host and back.

    A batch is noted by its ``id``, because a reference would keep its bytes. A later batch with the
    same ``id`` replaces it at its own copy to the host, which comes first.

    Attributes:
        pairs: Copies to the host and back of the same bytes.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[Note, Note]] = []
        self._before: dict[int, tuple[Event, Note]] = {}  # with the event, which keeps its id
        self._sent: dict[int, Note] = {}
        self._back: dict[int, Note] = {}

    def add(self, note: Note, moved: Moved, event: Event) -> None:
        """Add a copy that is queued before ``event``."""
        self._before[id(event)] = event, note
        if note.track == tl.D2H:
            self._sent.update((id(batch), note) for batch, _ in moved)
            return
        self._back.update((id(batch), note) for batch, _ in moved)
        sources = dict.fromkeys(self._sent.get(id(batch)) for batch, _ in moved)
        self.pairs += [(source, note) for source in sources if source is not None]

    def name_of_wait(self, event: Event) -> str:
        """Name a wait for ``event``."""
        copy = self._before.get(id(event))
        return tl.WAITS_FOR_UNKNOWN if copy is None else f"waits for {copy[1].name}"

    def first_use(self, saved: Saved) -> Note | None:
        """Return the copy that reloaded a tensor; None if the copy had a use before."""
        reload = saved.batch.back.reloads[saved.index]
        if reload is None or reload.event is None:  # its source was still there
            return None
        note = self._back.get(id(saved.batch))
        return None if note is None or note.used is not None else note


class Counters:
    """Bytes of an engine, read without waiting; ``readings`` have their events."""

    def __init__(self, offloader: Offloader) -> None:
        self.readings: list[Reading] = []
        self._offloader = offloader
        self._least_peak = 0
        self._num_on_demand = 0

    def read(self) -> dict[str, int]:
        """Read the bytes of each counter, as the host knows them now."""
        mover = self._offloader.engine.mover
        with mover.lock:
            host = sum([pool.in_use_bytes for pool in mover.tier.pools])
            values = {tl.HOST: host, tl.IN_FLIGHT: mover.in_flight.nbytes}
            values[tl.RELOADED] = mover.arrived.unused_bytes
        if (allocated := self._offloader.backend.allocated()) is not None:
            values[tl.DEVICE] = allocated.nbytes
            self._least_peak = min(self._least_peak, allocated.peak_bytes)
        return values

    def end_step(self) -> dict[str, int]:
        """Return facts of the step since the last call.

        A device knows its peak since the last reset of the peak. It is the peak of this step where
        it rose above all readings of the step.
        """
        num = self._offloader.engine.mover.counts.on_demand_reloads
        facts = {"on_demand_reloads": num - self._num_on_demand}
        self._num_on_demand = num
        if (allocated := self._offloader.backend.allocated()) is not None:
            if allocated.peak_bytes > self._least_peak:
                facts["device_peak_bytes"] = allocated.peak_bytes
            self._least_peak = allocated.peak_bytes
        return facts
