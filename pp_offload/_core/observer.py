"""Observers of an engine: traces, the choice of bounds, and what plans are made from.

    class Peak(Observer):
        def reached(self, group):
            self.names.append(group.name)

    engine.observers.add(peak)

A method that no observer overrides is not called.

NOTE [ Where observers are called ]
    On the thread that acted, after it did. Where a method says "Under the lock", the engine's lock
    is held: an observer may neither wait nor call the engine there. What an observer raises goes to
    the program, as if the engine had raised it.
"""

from __future__ import annotations

import weakref
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
"""Payloads by batch."""


class Lap(NamedTuple):
    """When copies that were queued together ran, or a wait."""

    begin: TimedEvent
    end: TimedEvent
    nbytes: int
    """Of the copies; 0 for a wait."""


class Observer:
    """Does nothing. Override what you want to observe."""

    def opened(self, group: Group) -> None:
        """What autograd saves from now on joins the group. Under the lock."""

    def closed(self, group: Group, payloads: Payloads | None) -> None:
        """A group was committed: its batch left, or it stays on the device; its state says which.

        ``payloads`` are what it saved; members whose bytes left have a batch. None where a program
        records operators, and nothing was collected.
        """

    def reached(self, group: Group) -> None:
        """Backward is about to use the first tensor of the group. Under the lock."""

    def used(self, saved: Saved, payload: Tensor) -> None:
        """Autograd is about to get a tensor that left, in order with the live compute stream. Only
        for groups that were closed while an observer overrode this.
        """

    def copied(self, lap: Lap | None, moved: Moved, event: Event, *, to_host: bool) -> None:
        """Copies of payloads are queued, to the host or to the device. Under the lock.

        Args:
            lap: When they run; None in a capture, where nothing runs.
            moved: Which payloads. An observer that keeps a batch keeps its bytes.
            event: Behind them.
            to_host: Else to the device.
        """

    def waited(self, lap: Lap | None, event: Event) -> None:
        """The live compute stream waits for ``event``, behind copies; no ``lap`` in a capture."""


@dataclass(slots=True)
class Observers:
    """What to call at each event, as in ``for call in observers.reached: call(group)``."""

    opened: tuple[Callable[[Group], None], ...] = ()
    closed: tuple[Callable[[Group, Payloads | None], None], ...] = ()
    reached: tuple[Callable[[Group], None], ...] = ()
    used: tuple[Callable[[Saved, Tensor], None], ...] = ()
    copied: tuple[Callable[..., None], ...] = ()
    waited: tuple[Callable[[Lap | None, Event], None], ...] = ()

    def add(self, observer: Observer) -> None:
        """Call the methods that ``observer`` overrides, behind those of observers added before."""
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

    def follow_uses(self, payloads: Payloads) -> None:
        """Have :meth:`Observer.used` called for what has just left. The lock is held, without which
        nobody gets it back.
        """
        reached = payloads.chosen.reached if payloads.chosen else []
        for members in (*payloads.members, reached):
            for saved in members:
                saved.restore = Followed(self, weakref.ref(saved), saved.restore)


class Followed(NamedTuple):
    """Has observers called where a saved tensor is made of its payload."""

    observers: Observers
    saved: weakref.ref[Saved]
    """Weakly: a cycle would keep its bytes until garbage is collected."""

    unobserved: Callable[[Tensor], Tensor] | None
    """What makes it."""

    def __call__(self, payload: Tensor) -> Tensor:
        saved = self.saved()
        assert saved is not None, "it is being unpacked"
        for call in self.observers.used:
            call(saved, payload)
        return payload if self.unobserved is None else self.unobserved(payload)
