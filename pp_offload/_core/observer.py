"""Observers of an engine, for traces, the choice of bounds, and plans.

    class Peak(Observer):
        def reached(self, group):
            self.names.append(group.name)

    engine.observers.add(peak)

A method that no observer overrides is not called.

NOTE [ Where observers are called ]
    On the acting thread, after the action. Where a method says "Under the lock", the engine's lock
    is held: an observer may neither wait nor call the engine there. An observer's exception goes
    to the program, as if the engine had raised it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from torch import Tensor

from pp_offload._core.batch import Batch
from pp_offload._core.group import Group
from pp_offload._core.payloads import Payloads
from pp_offload._core.saved import Saved
from pp_offload.backends import Event, TimedEvent

Moved = Sequence[tuple[Batch, Sequence[int]]]
"""Batches, each with the indices of some payloads."""


class Lap(NamedTuple):
    """Begin and end of copies that were queued together, or of a wait."""

    begin: TimedEvent
    end: TimedEvent
    nbytes: int
    """Bytes of the copies; 0 for a wait."""


class Observer:
    """An observer that does nothing. Override the methods of events to observe."""

    def opened(self, group: Group) -> None:
        """Called when a group opens, before autograd saves into it. Under the lock."""

    def closed(self, group: Group, payloads: Payloads | None) -> None:
        """Called after a commit: the batch left, or the group stays; its state says which.

        ``payloads`` are the group's; members whose bytes left have a batch. None where a program
        records operators, and nothing was collected.
        """

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
    reached: tuple[Callable[[Group], None], ...] = ()
    used: tuple[Callable[[Saved, Tensor], None], ...] = ()
    copied: tuple[Callable[..., None], ...] = ()
    waited: tuple[Callable[[Lap | None, Event], None], ...] = ()

    def add(self, observer: Observer) -> None:
        """Call the methods that ``observer`` overrides, after the methods of earlier observers."""
        for event in fields(self):
            if getattr(type(observer), event.name) is not getattr(Observer, event.name):
                setattr(
                    self, event.name, (*getattr(self, event.name), getattr(observer, event.name))
                )

    def remove(self, observer: Observer) -> None:
        for event in fields(self):
            calls = getattr(self, event.name)
            rest = [call for call in calls if getattr(call, "__self__", None) is not observer]
            setattr(self, event.name, tuple(rest))
