"""Notes of a recording, and the timeline made of them when it ends.

clock = Clock(backend, begin)        # begin: an event on compute, recorded just now
notes.append(Note("d2h", "mlp (offload)", begin=lap.begin, end=lap.end))
spans = spans_of(notes, clock, rank=0)

A note has events of the device, whose times are asked for only at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pp_offload._core.group import Counts
from pp_offload.backends import Backend, CpuBackend, HostTimed
from pp_offload.trace.timeline import DISK, Flow, Point, Sample, Span

Reading = tuple[Any, dict[str, int]]
"""An event on compute, and bytes by counter."""


class Clock:
    """Clock that turns events into seconds from ``begin`` on.

    On a device with a clock, the host waits for ``begin`` once and reads the wall clock beside it.
    A simulated device has no times, so its copies have those at which the host queued them.
    """

    def __init__(self, backend: Backend, begin: Any) -> None:
        self.kind = "virtual" if hasattr(backend.d2h, "listeners") else "device"
        if isinstance(begin, HostTimed):
            self.kind = "host" if isinstance(backend, CpuBackend) else "host, as queued"
        self.is_virtual, self._begin = self.kind == "virtual", begin
        if not self.is_virtual:
            begin.synchronize()
        self.base_ns = 0 if self.is_virtual else time.time_ns()
        self._host_s = time.perf_counter() if self.kind == "device" else begin.time_s

    def seconds(self, at: Any) -> float | None:
        """Seconds of an event; None if it was never recorded, or a copy before it failed."""
        if at is None or isinstance(at, float):
            return at
        if self.is_virtual:  # a stream without work passes an event when it is recorded
            return float(max(at.time_s, at.recorded_s))
        with suppress(RuntimeError):
            return self._begin.elapsed_time(at) / 1e3
        return None

    def of_host(self, counter_s: float) -> float:
        """Seconds of a time by ``perf_counter``, or by the clock of a virtual disk."""
        return counter_s if self.is_virtual else float(counter_s - self._host_s)


@dataclass(slots=True, eq=False)
class Note:
    """Note of a future span. ``begin`` and ``end`` are events, or seconds of the clock."""

    track: str
    name: str
    begin: Any
    end: Any = None
    args: dict[str, Any] = field(default_factory=dict)
    counts: Counts | None = None
    """Counts of a group, whose bytes are final only when the recording ends."""

    used: tuple[str, Any] | None = None
    """Track and event of the first use of reloaded bytes."""


def spans_of(notes: Iterable[Note], clock: Clock, *, rank: int) -> dict[Note, Span]:
    """Make spans of the notes that have a begin and an end."""
    spans: dict[Note, Span] = {}
    for note in notes:
        begin_s, end_s = clock.seconds(note.begin), clock.seconds(note.end)
        if begin_s is not None and end_s is not None:
            nbytes = {} if note.counts is None else {"bytes": note.counts.copied_bytes}
            spans[note] = Span(rank, note.track, note.name, begin_s, end_s, note.args | nbytes)
    return spans


def flow_of(source: Span, reload: Span, used: tuple[str, Any] | None, clock: Clock) -> Flow:
    """Make the flow from a copy to the host to the copy back and its first use."""
    points = [Point(span.track, span.begin_s) for span in (source, reload)]
    if used is not None and (used_s := clock.seconds(used[1])) is not None:
        points.append(Point(used[0], used_s))
    return Flow(source.rank, source.name.removesuffix(" (offload)"), tuple(points))


def samples_of(readings: Iterable[Reading], clock: Clock, *, rank: int) -> Iterator[Sample]:
    """Make samples of each counter where its value changes."""
    last: dict[str, int] = {}
    for at, values in readings:
        time_s = clock.seconds(at)
        for counter, nbytes in values.items():
            if time_s is not None and last.get(counter) != nbytes:
                last[counter] = nbytes
                yield Sample(rank, counter, time_s, nbytes)


def spread(disk: Iterable[Note], clock: Clock) -> Iterator[Note]:
    """Put each piece of disk work on the first disk track that is free at its begin."""
    ends_s: list[float] = []
    for note in sorted(disk, key=lambda note: float(note.begin)):
        note.begin, note.end = clock.of_host(note.begin), clock.of_host(note.end)
        number = next((n for n, end_s in enumerate(ends_s) if end_s <= note.begin), len(ends_s))
        ends_s[number : number + 1] = [note.end]
        note.track = f"{DISK} {number + 1}" if number else DISK
        yield note
