"""Times copies and waits of this engine for its observers, as ``_core/stopwatch.py`` does those of
the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

from torch import Tensor

from pp_offload._core.observer import Lap
from pp_offload._core.stopwatch import time_of
from pp_offload._transfer.ticket import Ticket
from pp_offload.backends import Backend, Event, Stream, TimedEvent


class Laps(Protocol):
    """Notes what was timed."""

    is_cut: bool
    """Set where some of it ran in a capture, and has no times."""

    def queueing(self, label: str, *, to_host: bool) -> AbstractContextManager[object] | None:
        """What is entered while the host queues copies, if anything."""
        ...

    def copied(self, lap: Lap, tickets: Sequence[Ticket], event: Event, *, to_host: bool) -> None:
        """Copies of these tickets were queued; ``event`` is behind them."""
        ...

    def waited(self, lap: Lap, event: Event) -> None:
        """The live compute stream waits for ``event``."""
        ...


_NOTHING: Any = nullcontext()


class Stopwatch:
    """Copies and waits, timed while somebody wants to know.

    Args:
        backend: Has the streams, and perhaps a clock.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._running: tuple[Laps, ...] = ()

    def add(self, laps: Laps) -> None:
        """Time what comes for ``laps`` as well."""
        self._running = (*self._running, laps)

    def stop(self, laps: Laps) -> None:
        """Time nothing for these any more."""
        self._running = tuple([other for other in self._running if other is not laps])

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
        if not running or stream != self._backend.current_stream():
            stream.wait_event(event)
            return
        begin = self.at(stream)
        stream.wait_event(event)
        end = self.at(stream)
        if begin is not None and end is not None:
            for laps in running:
                laps.waited(Lap(begin, end, 0), event)

    def at(self, stream: Stream) -> TimedEvent | None:
        """Behind all that ``stream`` was given; None in a capture, where nothing runs."""
        event = time_of(self._backend, stream)
        if event is None:
            for laps in self._running:
                laps.is_cut = True
        return event
