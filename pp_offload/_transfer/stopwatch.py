"""When copies and waits begin and end, by the device's own clock.

Events that know their time are recorded around them while somebody times, and read when all has
ended: the host waits for nothing. Several may time at once; the events are recorded once for all.

    watch = Stopwatch(backend)
    laps = watch.start()
    event = watch.copy(backend.d2h, targets, sources, tickets)  # the backend's copy, and what is
    watch.wait(compute, event)                                  # behind it; the stream's wait_event
    at = watch.now(laps)
    is_whole = watch.stop(laps)
    ...
    if laps.are_over():
        laps.seconds_until(at)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from pp_offload._transfer.ticket import Ticket
from pp_offload.backends import Backend, Event, Stream, TimedEvent
from pp_offload.backends.host_clock import timed_by_host


class Lap(NamedTuple):
    """Copies that were queued together, or a wait."""

    begin: TimedEvent
    end: TimedEvent
    nbytes: int
    """Of the copies."""


class Laps:
    """What was timed. Those who want to know more of it override what notes it.

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

    def queueing(self, label: str, *, to_host: bool) -> AbstractContextManager[object] | None:
        """What is entered while the host queues copies, if anything."""
        return None

    def copied(self, lap: Lap, tickets: Sequence[Ticket], event: Event, *, to_host: bool) -> None:
        """Copies of these tickets were queued.

        Args:
            lap: When they run.
            tickets: Whoever keeps one keeps its bytes.
            event: Behind them; compute may wait for it.
            to_host: Else to the device.
        """
        (self.offloads if to_host else self.reloads).append(lap)

    def waited(self, lap: Lap, event: Event) -> None:
        """The live compute stream waits for ``event``."""
        self.waits.append(lap)


_NOTHING: Any = nullcontext()


class Stopwatch:
    """Copies and waits, timed while somebody wants to know.

    Args:
        backend: Has the streams, and perhaps a clock.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._running: tuple[Laps, ...] = ()

    def start(self) -> Laps | None:
        """Time what comes; None where the device has no clock, and in a capture."""
        begin = None if self._backend.is_capturing else self._on_device(self._live())
        if begin is None:
            return None
        laps = Laps(begin)
        self.add(laps)
        return laps

    def add(self, laps: Laps) -> None:
        """Time what comes for ``laps`` as well."""
        self._running = (*self._running, laps)

    def stop(self, laps: Laps) -> bool:
        """Time nothing for these any more; whether all that ran meanwhile was timed."""
        self._running = tuple([one for one in self._running if one is not laps])
        return not laps.is_cut

    def now(self, laps: Laps) -> TimedEvent | None:
        """Behind all that the live compute stream was given; None if these do not run."""
        event = self.at(self._live()) if laps in self._running else None
        if event is not None:
            laps.end = event
        return event

    def copy(
        self,
        stream: Stream,
        targets: list[Tensor],
        sources: list[Tensor],
        tickets: Sequence[Ticket],
    ) -> Event:
        """Have the backend queue copies on ``stream``, as :meth:`Backend.copy`; what is behind."""
        running, label = self._running, tickets[0].label
        if not running:
            self._backend.copy(stream, targets, sources, label)
            return stream.record_event()
        to_host = stream is self._backend.d2h
        begin = self.at(stream)
        inside = [laps.queueing(label, to_host=to_host) for laps in running]
        with ExitStack() if any(inside) else _NOTHING as stack:
            for one in filter(None, inside):
                stack.enter_context(one)
            self._backend.copy(stream, targets, sources, label)
        end, event = self.at(stream), stream.record_event()
        if begin is not None and end is not None:
            lap = Lap(begin, end, sum([target.nbytes for target in targets]))
            for laps in running:
                laps.copied(lap, tickets, event, to_host=to_host)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Have a compute stream wait for ``event``; that of the live one is timed."""
        running = self._running
        if not running or stream != self._live():
            stream.wait_event(event)
            return
        begin = self.at(stream)
        stream.wait_event(event)
        end = self.at(stream)
        if begin is not None and end is not None:
            for laps in running:
                laps.waited(Lap(begin, end, 0), event)

    def at(self, stream: Stream) -> TimedEvent | None:
        """Behind all that ``stream`` was given, by the host's clock where the device has none.

        None in a capture, where nothing runs: what is timed has a gap there.
        """
        if not self._backend.is_capturing:
            return self._on_device(stream) or timed_by_host(stream)
        for laps in self._running:
            laps.is_cut = True
        return None

    def _on_device(self, stream: Stream) -> TimedEvent | None:
        return self._backend.timed_event(stream)

    def _live(self) -> Stream:
        return self._backend.current_stream()


def seconds(laps: Iterable[Lap]) -> float:
    """How long they took together."""
    return sum([lap.begin.elapsed_time(lap.end) for lap in laps]) / 1e3
