"""Waits for what must end before memory can be had, where no lock is held.

def allocate() -> Loan: ...                # raises Unfinished; then nothing was begun
loan = when_finished(lock, allocate)       # with the lock held, but for the waits
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from typing import Any, ParamSpec, TypeVar

from pp_offload.backends import Event
from pp_offload.errors import TierError

P = ParamSpec("P")
T = TypeVar("T")


class Unfinished(Exception):
    """Copies or threads still use the memory. To be caught and waited for: see the module."""

    def __init__(self, events: Iterable[Event]) -> None:
        super().__init__("copies or threads still use the memory")
        self.events = tuple(events)


def check_finished(events: Iterable[Event]) -> None:
    """Raise :class:`Unfinished` for those that have not ended."""
    left = [event for event in events if not event.query()]
    if left:
        raise Unfinished(left)


def wait_for(events: Iterable[Event]) -> None:
    """Block until all have ended. Raises what a copy raised, whose event is never seen to end."""
    for event in events:
        with suppress(TierError):  # whoever needs these bytes gets it
            event.synchronize()


def when_finished(
    lock: AbstractContextManager[Any], act: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call ``act`` with the lock held; wait without it for what it raises, and call it again.

    Not to be called with the lock held already.
    """
    while True:
        try:
            with lock:
                return act(*args, **kwargs)
        except Unfinished as unfinished:
            events = unfinished.events
        wait_for(events)  # outside the except: the error's frames hold tensors
