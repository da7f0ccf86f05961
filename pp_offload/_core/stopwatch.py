"""Times copies and waits by the device's own clock: while an observer listens, events that know
their time are recorded around each. The host waits for nothing.

    laps = Laps.started(backend)
    observers.add(laps)
    ...
    at = laps.now(backend)
    if laps.are_over():  # asked later
        laps.seconds_until(at)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.profiler import record_function

from pp_offload._common.torch_private import is_profiling
from pp_offload._core.observer import Lap, Moved, Observer, Observers
from pp_offload.backends import Backend, Event, Stream, TimedEvent, timed_by_host


class Laps(Observer):
    """Laps of copies to the host, of copies to the device, and of waits of compute for these.

    Attributes:
        end: Last event that :meth:`now` returned.
        is_cut: Whether a part ran in a capture, and has no times.
    """

    def __init__(self, begin: TimedEvent) -> None:
        self.begin = self.end = begin
        self.is_cut = False
        self.offloads: list[Lap] = []
        self.reloads: list[Lap] = []
        self.waits: list[Lap] = []

    @classmethod
    def started(cls, backend: Backend) -> Laps | None:
        """Return Laps that begin now; None where the device has no clock, and in a capture."""
        begin = None if backend.is_capturing else backend.timed_event(backend.current_stream())
        return None if begin is None else cls(begin)

    def now(self, backend: Backend) -> TimedEvent | None:
        """Return an event behind all work of the live compute stream; None in a capture."""
        event = time_of(backend, backend.current_stream())
        if event is None:
            self.is_cut = True
        else:
            self.end = event
        return event

    def are_over(self) -> bool:
        """Whether all laps have ended, so that times can be read. Never blocks."""
        last = [laps[-1].end for laps in (self.offloads, self.reloads, self.waits) if laps]
        return all([event.query() for event in (self.end, *last)])

    def seconds_until(self, event: TimedEvent) -> float:
        """Return the seconds from the begin to ``event``."""
        return self.begin.elapsed_time(event) / 1e3

    def copied(self, lap: Lap | None, moved: Moved, event: Event, *, to_host: bool) -> None:
        self._add(self.offloads if to_host else self.reloads, lap)

    def waited(self, lap: Lap | None, event: Event) -> None:
        self._add(self.waits, lap)

    def _add(self, laps: list[Lap], lap: Lap | None) -> None:
        if lap is None:
            self.is_cut = True
        else:
            laps.append(lap)


def seconds(laps: Iterable[Lap]) -> float:
    return sum([lap.begin.elapsed_time(lap.end) for lap in laps]) / 1e3


def time_of(backend: Backend, stream: Stream) -> TimedEvent | None:
    """Return an event behind all work of ``stream``, by the host's clock where the device has none;
    None in a capture, where nothing runs.
    """
    if backend.is_capturing:
        return None
    return backend.timed_event(stream) or timed_by_host(stream)


def timed_copy(
    observers: Observers,
    backend: Backend,
    stream: Stream,
    record: Callable[[], Event],
    targets: list[Tensor],
    sources: list[Tensor],
    moved: Moved,
) -> Event:
    """Queue copies on ``stream``, and give observers their lap."""
    label, to_host = moved[0][0].label, stream is backend.d2h
    begin = time_of(backend, stream)
    with named(label, direction(to_host)):
        backend.copy(stream, targets, sources, label)
    end, event = time_of(backend, stream), record()
    lap = _lap(begin, end, sum([target.nbytes for target in targets]))
    for tell in observers.copied:
        tell(lap, moved, event, to_host=to_host)
    return event


def timed_wait(
    observers: Observers, backend: Backend, wait: Callable[[Event], None], event: Event
) -> None:
    """Make compute wait for ``event``, and give observers the lap."""
    live = backend.current_stream()
    begin = time_of(backend, live)
    wait(event)
    lap = _lap(begin, time_of(backend, live), 0)
    for tell in observers.waited:
        tell(lap, event)


def _lap(begin: TimedEvent | None, end: TimedEvent | None, nbytes: int) -> Lap | None:
    return None if begin is None or end is None else Lap(begin, end, nbytes)


def direction(to_host: bool) -> str:
    return "offload" if to_host else "reload"


def named(label: str, what: str) -> AbstractContextManager[object]:
    """Return a context with this name in ``torch.profiler``, if that runs."""
    return record_function(f"{label} ({what})") if is_profiling() else nullcontext()
