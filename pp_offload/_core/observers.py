"""Observers of an engine, for traces, the choice of bounds, and plans; and the times of copies.

    class Peak(Observer):
        def reached(self, group):
            self.names.append(group.name)

    engine.observers.add(peak)

A method that no observer overrides is not called. While an observer listens to times, events that
know their time are recorded around each copy and wait; the host waits for nothing:

    laps = Laps(backend.timed_event(backend.current_stream()))
    observers.add(laps)
    at = laps.now(backend)
    if laps.are_over():  # asked later
        laps.seconds_until(at)

NOTE [ Where observers are called ]
    On the acting thread, after the action. Where a method says "Under the lock", the engine's lock
    is held: an observer may neither wait nor call the engine there. An observer's exception goes
    to the program, as if the engine had raised it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.profiler import record_function

from pp_offload._common.torch_private import is_profiling
from pp_offload._core.batch import Batch
from pp_offload._core.group import Group
from pp_offload._core.payloads import Payloads
from pp_offload._core.saved import Saved
from pp_offload.backends import Backend, Event, Stream, TimedEvent, timed_by_host

Moved = Sequence[tuple[Batch, Sequence[int]]]  # batches, and indices of their payloads


class Lap(NamedTuple):
    """Begin and end of copies that were queued together, or of a wait."""

    begin: TimedEvent
    end: TimedEvent
    nbytes: int  # of the copies; 0 for a wait


class Observer:
    """An observer that does nothing. Override the methods of events to observe."""

    def opened(self, group: Group) -> None:
        """Called when a group opens, before autograd saves into it. Under the lock."""

    def closed(self, group: Group, payloads: Payloads | None) -> None:
        """Called after a commit: the batch left, or the group stays; its state says which.

        ``payloads`` are the group's; members whose bytes left have a batch. None where a program
        records operators, and nothing was collected.
        """

    def gathered(self, saved: Saved, view: Tensor, copy: Tensor) -> None:
        """Called when compute copied a view, so that it leaves without the rest of its storage."""

    def reached(self, group: Group) -> None:
        """Called before backward uses the first tensor of the group. Under the lock."""

    def used(self, saved: Saved, payload: Tensor) -> None:
        """Called before autograd gets a tensor that left, in order with the live compute stream."""

    def copied(self, lap: Lap | None, moved: Moved, event: Event, *, to_host: bool) -> None:
        """Called when copies of payloads are queued, to the host or to the device. Under the lock.

        Args:
            lap: Begin and end of the copies; None in a capture, where nothing runs.
            moved: The payloads. An observer that keeps a batch keeps its bytes.
            event: Recorded behind the copies.
            to_host: True for copies to the host, False for copies to the device.
        """

    def waited(self, lap: Lap | None, event: Event) -> None:
        """Called when the live compute stream waits for copies; ``lap`` is None in a capture."""


@dataclass(slots=True)
class Observers:
    """Callbacks of each event, as in ``for call in observers.reached: call(group)``."""

    opened: tuple[Callable[[Group], None], ...] = ()
    closed: tuple[Callable[[Group, Payloads | None], None], ...] = ()
    gathered: tuple[Callable[[Saved, Tensor, Tensor], None], ...] = ()
    reached: tuple[Callable[[Group], None], ...] = ()
    used: tuple[Callable[[Saved, Tensor], None], ...] = ()
    copied: tuple[Callable[..., None], ...] = ()
    waited: tuple[Callable[[Lap | None, Event], None], ...] = ()

    def add(self, observer: Observer) -> None:
        """Call the methods that ``observer`` overrides, after the methods of earlier observers."""
        for name in self.__slots__:
            if getattr(type(observer), name) is not getattr(Observer, name):
                setattr(self, name, (*getattr(self, name), getattr(observer, name)))

    def remove(self, observer: Observer) -> None:
        for name in self.__slots__:
            calls = getattr(self, name)
            rest = [call for call in calls if getattr(call, "__self__", None) is not observer]
            setattr(self, name, tuple(rest))


class Laps(Observer):
    """Laps of copies to the host, of copies to the device, and of waits of compute for these."""

    def __init__(self, begin: TimedEvent) -> None:
        self.begin = self.end = begin  # the end is the last event that now() returned
        self.is_cut = False  # whether a part ran in a capture, and has no times
        self.offloads: list[Lap] = []
        self.reloads: list[Lap] = []
        self.waits: list[Lap] = []

    def now(self, backend: Backend) -> TimedEvent | None:
        """Record an event behind all work of the current compute stream, as the end so far. In a
        capture there is none: the laps are cut.
        """
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


def lap_of(begin: TimedEvent | None, end: TimedEvent | None, nbytes: int) -> Lap | None:
    """Return the lap between two events of :func:`time_of`."""
    return None if begin is None or end is None else Lap(begin, end, nbytes)


def direction(to_host: bool) -> str:
    return "offload" if to_host else "reload"


def named(label: str, what: str) -> AbstractContextManager[object]:
    """Return a context with this name in ``torch.profiler``, if that runs."""
    return record_function(f"{label} ({what})") if is_profiling() else nullcontext()
