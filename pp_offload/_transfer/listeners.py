"""Listeners, which hear what the engine does: statistics, checks, tests.

    class Peak(Listener):
        most = 0

        def reload_started(self, label, nbytes):
            self.most = max(self.most, transfer.reloads.nbytes)

    transfer.listeners.add(Peak())

A method that no listener overrides is not called: an event without listeners costs an empty loop.

NOTE [ Where listeners are called ]
    On the thread that acted, after it did; ``leaving`` before. Where a method says "Under the
    lock", the engine's lock is held: it may note something, but neither wait nor call the engine.
    What a listener raises goes to the program, as if the engine had raised it; so a MemoryError of
    ``leaving`` or ``offloaded`` means that there is no room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from torch import Tensor

from pp_offload._transfer.ticket import Owner, SavedActivation, Ticket


class Listener:
    """Does nothing, whatever happens. Override what you want to hear."""

    def group_opened(self, group: Owner) -> None:
        """What autograd saves from now on joins it. Under the lock."""

    def group_closed(self, group: Owner) -> None:
        """It was committed, and is on its way off the device or stays there."""

    def group_reached(self, group: Owner) -> None:
        """Backward uses the first of its tensors. Under the lock."""

    def leaving(self, tickets: Sequence[Ticket]) -> None:
        """A group is about to leave: sources are as autograd saved them, nothing is queued.

        Compute may read them now, on the live stream. Not while a graph is captured, where they
        hold nothing yet.
        """

    def left(self, tickets: Sequence[Ticket]) -> None:
        """The group of ``leaving`` found room: its copies are queued, or shared with others.

        Autograd still holds the sources, and holds the tickets in their place from now on.
        """

    def kept(self, saved: Sequence[SavedActivation]) -> None:
        """A group stays on the device, with what autograd saved in it and still holds."""

    def offloaded(self, label: str, nbytes: int) -> None:
        """Copies of so many bytes off the device are queued. Under the lock.

        Args:
            label: The group of the bytes, the first one where there are several, or the slice.
            nbytes: At least one.
        """

    def reload_started(self, label: str, nbytes: int) -> None:
        """Copies of so many bytes back into device memory are queued. Under the lock.

        Args:
            label, nbytes: As for :meth:`offloaded`.
        """

    def reloads_queued(self, num: int, *, is_ahead: bool) -> None:
        """So many payloads are on their way, perhaps through a disk first. Under the lock.

        Args:
            num: May be zero.
            is_ahead: Whether backward has not reached them yet.
        """

    def taken_back(self, ticket: Ticket) -> None:
        """Its source, whose copy has still to run, is given out as it is. Under the lock."""

    def delivered(self, ticket: Ticket, tensor: Tensor) -> None:
        """The payload is about to be given to autograd, in order with the live compute stream."""

    def step_begun(self) -> None:
        """``reset()`` has closed the last step, and the next one begins. A listener may wait."""

    def replaced(self) -> None:
        """``configure()`` has put another engine in the place of this one; the manager has it."""


@dataclass(slots=True)
class Listeners:
    """What to call at each event, as in ``for heard in listeners.leaving: heard(tickets)``."""

    group_opened: tuple[Callable[[Owner], None], ...] = ()
    group_closed: tuple[Callable[[Owner], None], ...] = ()
    group_reached: tuple[Callable[[Owner], None], ...] = ()
    leaving: tuple[Callable[[Sequence[Ticket]], None], ...] = ()
    left: tuple[Callable[[Sequence[Ticket]], None], ...] = ()
    kept: tuple[Callable[[Sequence[SavedActivation]], None], ...] = ()
    offloaded: tuple[Callable[[str, int], None], ...] = ()
    reload_started: tuple[Callable[[str, int], None], ...] = ()
    reloads_queued: tuple[Callable[..., None], ...] = ()
    taken_back: tuple[Callable[[Ticket], None], ...] = ()
    delivered: tuple[Callable[[Ticket, Tensor], None], ...] = ()
    step_begun: tuple[Callable[[], None], ...] = ()
    replaced: tuple[Callable[[], None], ...] = ()

    def add(self, listener: Listener) -> None:
        """Have ``listener`` hear the events it overrides, behind those that were added before."""
        for event in fields(self):
            if getattr(type(listener), event.name) is not getattr(Listener, event.name):
                heard = getattr(self, event.name)
                setattr(self, event.name, (*heard, getattr(listener, event.name)))

    def remove(self, listener: Listener) -> None:
        """Have ``listener`` hear nothing any more."""
        for event in fields(self):
            heard = getattr(self, event.name)
            rest = tuple(one for one in heard if getattr(one, "__self__", None) is not listener)
            setattr(self, event.name, rest)
