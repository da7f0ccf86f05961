"""When copies and waits begin and end, by the device's own clock.

Events that know their time are recorded around them while it runs, and read when all has ended: the
host waits for nothing.

    watch = Stopwatch(backend)
    watch.start()
    watch.copy(backend.d2h, targets, sources, "mlp")  # as the backend's copy
    watch.wait(compute, event)                        # as the stream's wait_event
    at = watch.now()
    laps = watch.stop()
    ...
    if laps.are_over():
        laps.seconds_until(at)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from pp_offload.backends import Backend, Event, Stream, TimedEvent


class Lap(NamedTuple):
    """Copies that were queued together, or a wait."""

    begin: TimedEvent
    end: TimedEvent
    nbytes: int
    """Of the copies."""


class Laps:
    """What was timed.

    Args:
        begin: The times count from here.

    Attributes:
        offloads: Copies to the host.
        reloads: Copies to the device.
        waits: Of compute, for copies.
        end: The last point that somebody asked for.
        is_cut: Whether some of it ran in a capture, and has no times.
    """

    def __init__(self, begin: TimedEvent) -> None:
        self.begin = self.end = begin
        self.is_cut = False
        self.offloads: list[Lap] = []
        self.reloads: list[Lap] = []
        self.waits: list[Lap] = []

    def are_over(self) -> bool:
        """Whether all of it has ended, so that times can be read. Never blocks."""
        last = [laps[-1].end for laps in (self.offloads, self.reloads, self.waits) if laps]
        return all([event.query() for event in (self.end, *last)])

    def seconds_until(self, event: TimedEvent) -> float:
        """From the begin to ``event``."""
        return self.begin.elapsed_time(event) / 1e3


class Stopwatch:
    """Copies and waits, timed while it runs.

    Args:
        backend: Has the streams, and perhaps a clock.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._laps: Laps | None = None

    def start(self) -> bool:
        """Time what comes; whether the device has a clock. A second start begins anew."""
        begin = self._event(self._backend.current_stream())
        self._laps = None if begin is None else Laps(begin)
        return begin is not None

    def stop(self) -> Laps | None:
        """Time nothing any more; what was timed, if it ran and no graph was captured meanwhile."""
        laps, self._laps = self._laps, None
        return None if laps is None or laps.is_cut else laps

    def now(self) -> TimedEvent | None:
        """Behind all that the live compute stream was given; None if it does not run."""
        laps = self._laps
        event = None if laps is None else self._event(self._backend.current_stream())
        if laps is not None and event is not None:
            laps.end = event
        return event

    def copy(
        self, stream: Stream, targets: list[Tensor], sources: list[Tensor], label: str
    ) -> None:
        """Have the backend queue copies on ``stream``: see :meth:`Backend.copy`."""
        laps = self._laps
        if laps is None:
            self._backend.copy(stream, targets, sources, label)
            return
        begin = self._event(stream)
        self._backend.copy(stream, targets, sources, label)
        nbytes = sum([target.nbytes for target in targets])
        where = laps.offloads if stream is self._backend.d2h else laps.reloads
        self._note(where, begin, self._event(stream), nbytes)

    def wait(self, stream: Stream, event: Event) -> None:
        """Have a compute stream wait for ``event``; that of the live one is timed."""
        laps = self._laps
        if laps is None or stream != self._backend.current_stream():
            stream.wait_event(event)
            return
        begin = self._event(stream)
        stream.wait_event(event)
        self._note(laps.waits, begin, self._event(stream), 0)

    @staticmethod
    def _note(
        where: list[Lap], begin: TimedEvent | None, end: TimedEvent | None, nbytes: int
    ) -> None:
        if begin is not None and end is not None:
            where.append(Lap(begin, end, nbytes))

    def _event(self, stream: Stream) -> TimedEvent | None:
        if not self._backend.is_capturing:
            return self._backend.timed_event(stream)
        if self._laps is not None:
            self._laps.is_cut = True
        return None


def seconds(laps: Iterable[Lap]) -> float:
    """How long they took together."""
    return sum([lap.begin.elapsed_time(lap.end) for lap in laps]) / 1e3
