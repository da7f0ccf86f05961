"""Recording of some steps: notes of when groups, copies and waits run on the device.

A step runs from one ``manager.reset()``, which a schedule calls, to the next. After the last step
of the range, and at the latest at the end of the block, recording ends and the file is written.
The host waits for compute once, when recording starts, and for all events of the notes, when it
ends. In a capture nothing runs, and nothing is noted.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pp_offload._common.checks import check_kind
from pp_offload._common.processes import logger_of
from pp_offload._core.group import Counts, Group
from pp_offload._core.observers import Lap, Moved, Observer, direction, time_of
from pp_offload._core.payloads import Payloads
from pp_offload._groups.manager import Manager
from pp_offload._groups.offloader import Offloader
from pp_offload._megatron.manager import PipelineOffloadManager
from pp_offload.backends import Event
from pp_offload.trace import timeline as tl
from pp_offload.trace.timeline import Sample, Span, Timeline, part_of, write

logger = logger_of(__name__)


class Trace:
    """Recording of steps of the current manager into a file.

    In ``torch.distributed`` with several ranks, each rank writes its own file, named by
    :func:`part_of`, and sends nothing. :func:`merge_ranks` makes one file of them.

    Args:
        path: File to write; compressed if it ends in ``.gz``.
        steps: Steps to record, counted from 0 at the first ``reset()`` in the block. None records
            the whole block.

    The end of the block raises OSError if the file cannot be written; if the block raised, the log
    has it instead.

    Raises:
        TypeError: ``path`` is no path, or ``steps`` no range.
        ValueError: ``steps`` has no steps in a row, or no file can be at the path.

    Attributes:
        timeline: The recording, even if it cannot be written; None while recording.
    """

    def __init__(self, path: str | os.PathLike[str], *, steps: range | None = None) -> None:
        check_kind("path", path, (str, os.PathLike), "a path", 'write "out.json.gz"')
        self.path = Path(path)
        if not self.path.parent.is_dir() or self.path.is_dir():
            raise ValueError(f"path is {path}, expected a file in a folder that is there")
        if steps is not None:
            check_kind("steps", steps, range, "a range", "write range(2, 4)")
            if not steps or steps.step != 1 or steps.start < 0:
                raise ValueError(f"steps is {steps}, expected some steps in a row, from 0 on")
        self.timeline: Timeline | None = None
        self._steps, self._is_written, self._num_ranks = steps, False, 1
        self._managers: Sequence[Manager] = ()
        self._recorders: list[Recorder] = []

    def ranks(self, managers: Sequence[Manager]) -> AbstractContextManager[object]:
        """Record all ranks of a virtual pipeline, whose devices share one clock."""
        self._managers = managers
        return self

    def __enter__(self) -> Trace:
        managers = self._managers or (PipelineOffloadManager.get_instance(),)
        first, self._num_ranks = 0, len(managers)
        if len(managers) == 1 and dist.is_available() and dist.is_initialized():
            first, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self.timeline, self._is_written = None, False
        ranks = enumerate(managers, first)
        self._recorders = [Recorder(each, rank, self._steps, self._write) for rank, each in ranks]
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        for recorder in self._recorders:
            recorder.end()
        if not self._is_written:
            self._write(raises=kind is None)

    def _write(self, *, raises: bool = False) -> None:
        """Write the file when all ranks have ended. Training goes on if that fails."""
        parts = [part for each in self._recorders if (part := each.timeline) is not None]
        if len(parts) < len(self._recorders):
            return
        self.timeline = whole = Timeline(parts[0].base_ns)
        for part in parts:
            whole.add(part)
        path = part_of(self.path, whole.ranks[0]) if len(parts) < self._num_ranks else self.path
        try:
            write(whole, path)
        except OSError as failure:  # NOTE [ Failures in the log ]
            if raises:
                raise
            logger.error("%s cannot be written: %s", path, str(failure))
            return
        self._is_written = True
        if not whole.spans:
            logger.warning(
                "%s is empty, for nothing ran of the manager that was traced; expected steps of it "
                "inside the block, and reset() at the begin of each",
                path,
            )
        logger.info("%d spans of ranks %s are in %s", len(whole.spans), whole.ranks, path)


@dataclass(slots=True)
class Note:
    """Note of a future span. ``begin`` and ``end`` are events, or seconds of the timeline."""

    track: str
    name: str
    begin: Any
    end: Any
    args: dict[str, Any]


class Recorder(Observer):
    """Recording of a rank. It follows its manager to the engine that ``configure()`` makes, and
    calls ``ended`` when the last of ``steps`` is over. The timeline is None while recording.
    """

    def __init__(
        self, manager: Manager, rank: int, steps: range | None, ended: Callable[[], None]
    ) -> None:
        self.timeline: Timeline | None = None
        self._manager, self._rank, self._steps, self._ended = manager, rank, steps, ended
        self._step = -1
        self._follow(manager.offloader)
        manager.on_begin = (*manager.on_begin, self._begin)
        if steps is None:
            self._start()

    def _follow(self, offloader: Offloader) -> None:
        """Begin an empty recording of this engine."""
        self._offloader, self._backend = offloader, offloader.backend
        self._zero: Any = None  # the event at second 0
        self._base_ns, self._host_zero_s, self._has_captures = 0, 0.0, False
        self._notes: list[Note] = []
        self._readings: list[tuple[Any, dict[str, int]]] = []
        self._least_peak = self._num_on_demand = 0
        # Streams of a virtual device tell the times of their work. Events would be less exact: one
        # between two works has the end of the first, though the host may launch the second later.
        self._is_virtual = False
        self._copy_times: list[tuple[float, float]] = []  # of copies without a note
        self._waits: list[tuple[str, Any]] = []  # of compute for copies, since it last worked
        self._operators: Note | None = None  # the last
        self._sources: list[tuple[Any, Callable[..., None]]] = []  # to which it listens
        self._owners: dict[str, list[object]] = {}  # by kind of track
        self._open: dict[Group, Note] = {}
        self._running: dict[str, Note] = {}  # by track: the step, and the last group of backward
        self._copies: dict[int, tuple[Event, str]] = {}  # with the event, which keeps its id

    def _begin(self) -> None:
        """Begin a step, or follow the manager to another engine."""
        steps = self._steps
        if self._offloader is not self._manager.offloader:
            self._stop()
            if self._notes:
                logger.warning("configure() was called while a trace ran: it begins anew")
            self._follow(self._manager.offloader)
            return
        self._step += 1
        if steps is None or self._step in steps:
            self._start()
            if (at := self._now()) is not None:
                self._end_step(at)
                note = self._add(tl.STEPS, f"step {self._step}", at, step=self._step)
                self._running[tl.STEPS] = note
                if self._is_virtual:
                    backend: Any = self._backend
                    backend.memory.take_peak()  # or a step without groups would show none
                self._read(at)
        elif self._step >= steps.stop and not self._backend.is_capturing:
            self.end()
            self._ended()

    def _start(self) -> None:
        """Start, unless a graph is captured. A second call does nothing."""
        zero = self._now()
        if zero is None or self._zero is not None:
            return
        self._track()  # the current stream is the first
        self._is_virtual = hasattr(self._backend.d2h, "listeners")
        if not self._is_virtual:  # else the clock begins at 0 for all ranks
            zero.synchronize()  # so that nothing is between the host's time and second 0
            self._base_ns, self._host_zero_s = time.time_ns(), time.perf_counter()
            zero = self._now()
        self._zero = zero
        with self._offloader.lock:
            if self._is_virtual:
                self._listen(self._backend.current_stream(), self._computed)
                for stream in (self._backend.d2h, self._backend.h2d):
                    self._listen(stream, lambda _, *times: self._copy_times.append(times))
            if (disk := self._offloader.engine.mover.tier.disk) is not None:
                self._listen(disk, self._disk_worked)
            self._offloader.observers.add(self)

    def _listen(self, source: Any, call: Callable[..., None]) -> None:
        source.listeners = (*source.listeners, call)
        self._sources.append((source, call))

    def _stop(self) -> None:
        """Stop to observe. A second call does nothing."""
        with self._offloader.lock:
            self._offloader.observers.remove(self)
            for source, call in self._sources:
                source.listeners = tuple(each for each in source.listeners if each != call)
        self._open.clear()

    def end(self) -> None:
        """Stop, wait for all events of the notes, and make the timeline. Twice is once."""
        if self.timeline is not None:
            return
        calls = self._manager.on_begin
        self._manager.on_begin = tuple(call for call in calls if call != self._begin)
        self._stop()
        self._end_step(self._now())
        for note in () if self._is_virtual else self._notes:
            for at in (note.begin, note.end):
                with suppress(Exception):  # a failed copy is reported where its bytes are used
                    at.synchronize()
        self.timeline = self._make_timeline()

    def _seconds(self, at: Any) -> float | None:
        """Seconds of an event; None if it was never recorded, or a copy before it failed."""
        if at is None or isinstance(at, float):
            return at
        if self._is_virtual:  # a stream without work passes an event when it is recorded
            return float(max(at.time_s, at.recorded_s))
        with suppress(RuntimeError):
            return float(self._zero.elapsed_time(at) / 1e3)
        return None

    def _make_timeline(self) -> Timeline:
        """Make spans of the notes that have a begin and an end, and samples where values change."""
        facts = {"device": self._backend.name, "has_captures": self._has_captures}
        timeline = Timeline(self._base_ns, metadata={self._rank: facts})
        for note in self._notes:
            begin_s, end_s = self._seconds(note.begin), self._seconds(note.end)
            if isinstance(counts := note.args.get("bytes"), Counts):
                note.args["bytes"] = counts.copied_bytes
            if begin_s is not None and end_s is not None:
                span = Span(self._rank, note.track, note.name, begin_s, end_s, note.args)
                timeline.spans.append(span)
        last: dict[str, int] = {}
        for at, values in self._readings:
            time_s = self._seconds(at)
            for counter, nbytes in values.items():
                if time_s is not None and last.get(counter) != nbytes:
                    last[counter] = nbytes
                    timeline.samples.append(Sample(self._rank, counter, time_s, nbytes))
        return timeline

    # Calls of the engine

    def opened(self, group: Group) -> None:
        track, at = self._mark()
        self._open[group] = self._add(track, f"{group.name} (forward)", at)

    def closed(self, group: Group, payloads: Payloads | None) -> None:
        if (note := self._open.pop(group, None)) is not None:
            note.end, note.args = self._mark()[1], _facts(group)
            self._read(note.end)

    def reached(self, group: Group) -> None:
        track, at = self._mark()
        self._running[track] = self._add(track, f"{group.name} (backward)", at, **_facts(group))
        self._read(at)

    def copied(self, lap: Lap | None, moved: Moved, event: Event, *, to_host: bool) -> None:
        name = f"{moved[0][0].label} ({direction(to_host)})"
        num = sum(len(indices) for _, indices in moved)
        timed: Any = lap or (None, None, 0)
        begin, end, nbytes = timed
        if self._is_virtual:
            times = [each for each in self._copy_times if each[0] >= begin.time_s]  # not of others
            self._copy_times.clear()
            if times:
                begin, end = times[0][0], times[-1][1]
        self._add(tl.D2H if to_host else tl.H2D, name, begin, end, bytes=nbytes, payloads=num)
        self._copies[id(event)] = event, f"waits for {name}"

    def waited(self, lap: Lap | None, event: Event) -> None:
        _, name = self._copies.get(id(event), (None, tl.WAITS_FOR_UNKNOWN))
        if self._is_virtual:
            self._waits.append((name, lap))
        else:
            begin, end, _ = lap or (None, None, 0)
            self._add(self._track(), name, begin, end)

    def _disk_worked(self, name: str, nbytes: int, begin_s: float, end_s: float) -> None:
        times = begin_s - self._host_zero_s, end_s - self._host_zero_s
        self._add(self._numbered(tl.DISK, threading.get_ident()), name, *times, bytes=nbytes)

    def _computed(self, ready_s: float, begin_s: float, end_s: float) -> None:
        """Note work of a virtual device's compute, and its waits before."""
        waits, self._waits = self._waits, []
        for name, lap in waits:
            wait_s, until_s = max(ready_s, lap.begin.time_s), min(lap.end.time_s, begin_s)
            if wait_s < until_s:
                self._stalled(tl.WAITS_FOR_OTHERS, ready_s, wait_s)
                self._stalled(name, wait_s, until_s)
                ready_s = until_s
        self._stalled(tl.WAITS_FOR_OTHERS, ready_s, begin_s)
        if self._operators is not None and self._operators.end == begin_s:
            self._operators.end = end_s
        elif begin_s < end_s:
            self._operators = self._add(tl.OPERATORS, "operators", begin_s, end_s)

    def _stalled(self, name: str, begin_s: float, end_s: float) -> None:
        if begin_s < end_s:
            self._add(tl.COMPUTE, name, begin_s, end_s)

    # Notes

    def _add(self, track: str, name: str, begin: Any, end: Any = None, **args: Any) -> Note:
        """Make a note, which is dropped in a capture, where ``begin`` is None."""
        note = Note(track, name, begin, end, args)
        if begin is None:
            self._has_captures = True
        else:
            self._notes.append(note)
        return note

    def _end_step(self, at: Any) -> None:
        """End the running step with its facts, and the last groups of backward."""
        num = self._offloader.engine.mover.counts.on_demand_reloads
        facts = {"on_demand_reloads": num - self._num_on_demand}
        self._num_on_demand = num
        if (allocated := self._backend.allocated()) is not None:
            # The peak since its last reset: of this step, if above all readings of the step.
            if allocated.peak_bytes > self._least_peak:
                facts["device_peak_bytes"] = allocated.peak_bytes
            self._least_peak = allocated.peak_bytes
        if tl.STEPS in self._running:
            self._running[tl.STEPS].args |= facts
        for note in self._running.values():
            note.end = at
        self._running.clear()

    def _read(self, at: Any) -> None:
        """Note the bytes of each counter, as the host knows them now."""
        mover = self._offloader.engine.mover
        with mover.lock:
            host = sum([pool.in_use_bytes for pool in mover.tier.pools])
            values = {tl.HOST: host, tl.IN_FLIGHT: mover.in_flight.nbytes}
            values[tl.RELOADED] = mover.arrived.unused_bytes
        if (allocated := self._backend.allocated()) is not None:
            values[tl.DEVICE] = allocated.nbytes
            self._least_peak = min(self._least_peak, allocated.peak_bytes)
        self._readings.append((at, values))

    def _mark(self) -> tuple[str, Any]:
        """Return the compute track and an event there, which ends the last group of backward."""
        track, at = self._track(), self._now()
        if track in self._running:
            self._running.pop(track).end = at
        return track, at

    def _now(self) -> Any:
        """Record an event on the live compute stream; None in a capture."""
        return time_of(self._backend, self._backend.current_stream())

    def _track(self) -> str:
        """Name the track of the live compute stream; of the thread if the host is the device."""
        is_host, stream = self._backend.is_host, self._backend.current_stream()
        return self._numbered(tl.COMPUTE, threading.get_ident() if is_host else stream)

    def _numbered(self, track: str, owner: object) -> str:
        """Name the track of this kind for a stream or a thread; the first has no number."""
        owners = self._owners.setdefault(track, [])
        if owner not in owners:
            owners.append(owner)
        number = owners.index(owner)
        return f"{track} {number + 1}" if number else track


def _facts(group: Group) -> dict[str, Any]:
    """Make the arguments of a group's spans: a note of the group would keep its tensors."""
    facts: dict[str, Any] = {"state": group.state.value, "bytes": group.counts}  # final at the end
    if group.key is None:
        return facts
    (vp_stage, microbatch), position = group.key
    return {"microbatch": microbatch, "vp_stage": vp_stage, "position": position} | facts
