"""Reloaded payloads that are not used up, and unwanted ones whose copy still runs.

    reload = reloads.expect(ticket)  # before the copy into it is queued
    reloads.give_up(reload, h2d)     # used up, or nobody wants it
    reloads.poll(h2d)                # tickets that are gone, copies that are over

NOTE [ Torn bookkeeping ]
    A signal handler may raise between any two lines. So the memory that a copy reads or writes is
    registered before the copy is queued, still without an event; code that finds no event there
    records one, behind all that is queued. An entry leaves a queue only after it was handled, and
    is handled a second time if an interrupt came between. Counters that steer may be off after an
    interrupt; they are counted anew between steps.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, suppress
from typing import Any

from torch import Tensor

from pp_offload._transfer.ticket import DeviceCopy, PendingReload, Ticket, Where
from pp_offload.backends import Event, Stream
from pp_offload.errors import TierError

MAX_ABANDONED = 8
"""How many unwanted payloads, whose copies may still run, are kept without a wait."""


class PendingReloads:
    """Payloads on the device, or on their way there, that autograd has not asked for.

    Attributes:
        nbytes: Their bytes. See NOTE [ Torn bookkeeping ].
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._alive: set[PendingReload] = set()
        self._device_copies: dict[Where, DeviceCopy] = {}
        self._gone: deque[PendingReload] = deque()
        self._abandoned: deque[tuple[Tensor, Event, Stream]] = deque()

    def expect(self, ticket: Ticket) -> PendingReload:
        """Register that the payload of ``ticket`` will come; :meth:`begin` may say later where."""
        reload = PendingReload.of(ticket, self._gone)
        self._alive.add(reload)
        ticket.pending_reload = reload
        self.nbytes += reload.nbytes
        return reload

    def begin(self, ticket: Ticket, target: Tensor, stream: Stream) -> DeviceCopy:
        """Register a copy of its payload into ``target`` before it is queued."""
        device_copy = DeviceCopy(target, ticket, stream)
        self._device_copies[device_copy.where] = device_copy
        reload = ticket.pending_reload or self.expect(ticket)
        reload.device_copy = device_copy
        device_copy.num_reloads += 1
        return device_copy

    def share(self, ticket: Ticket, live: Stream) -> bool:
        """Give ``ticket`` the device copy of another with the same bytes, if it may use that."""
        device_copy = self.same_bytes(ticket, live)
        if device_copy is None:
            return False
        reload = ticket.pending_reload or self.expect(ticket)
        reload.device_copy = device_copy
        device_copy.num_reloads += 1
        self.nbytes -= reload.nbytes
        return True

    def same_bytes(self, ticket: Ticket, live: Stream) -> DeviceCopy | None:
        """The device copy of another ticket with the same bytes, if this one may use it."""
        device_copy = self._device_copies.get(ticket.where)
        if (
            device_copy is None
            or device_copy.copy() is not ticket.copy
            or device_copy.stream != live
        ):
            return None
        is_coming = device_copy.is_there or device_copy.reloaded is not None
        return device_copy if is_coming and device_copy.is_as_it_came else None

    def give_up(self, reload: PendingReload, h2d: Stream) -> None:
        """Forget what nobody will use any more; its memory stays until the copy into it has run."""
        if reload not in self._alive:
            return
        ticket, device_copy = reload(), reload.device_copy
        if ticket is not None and ticket.pending_reload is reload:
            ticket.pending_reload = None
        if device_copy is None or device_copy.num_reloads <= 1:
            self._let_go(device_copy, h2d)
            self.nbytes -= reload.nbytes
        else:
            device_copy.num_reloads -= 1
        self._alive.discard(reload)

    def _let_go(self, device_copy: DeviceCopy | None, h2d: Stream) -> None:
        if device_copy is None:
            return
        if not device_copy.is_there:
            event = device_copy.reloaded or h2d.record_event()  # NOTE [ Torn bookkeeping ]
            self._abandoned.append((device_copy.tensor, event, device_copy.stream))
        if self._device_copies.get(device_copy.where) is device_copy:
            del self._device_copies[device_copy.where]

    def poll(self, h2d: Stream) -> None:
        """Give up what was meant for tickets that are gone; forget copies that are over."""
        while self._gone:
            self.give_up(self._gone[0], h2d)
            self._gone.popleft()
        while self._abandoned and self._abandoned[0][1].query():
            self._abandoned.popleft()

    def events(self) -> list[Event]:
        """Events behind the copies to the device, also of what nobody wants."""
        copies = (one.device_copy for one in self._alive)
        alive = [one.reloaded for one in copies if one is not None and one.reloaded is not None]
        return [*alive, *(event for _, event, _ in self._abandoned)]

    def keep_few_abandoned(self, lock: AbstractContextManager[Any]) -> None:
        """Let more than a few unwanted payloads go: their stream waits for the copies into them.

        Not to be called with the lock held: it blocks where the device is the host. Meanwhile
        another thread may have found the same one, and may have let it go.
        """
        while True:
            with lock:
                oldest = self._abandoned[0] if len(self._abandoned) > MAX_ABANDONED else None
            if oldest is None:
                return
            _, reloaded, stream = oldest
            with suppress(TierError):  # nobody wants what could not be read
                stream.wait_event(reloaded)
            with lock:
                if self._abandoned and self._abandoned[0] is oldest:
                    self._abandoned.popleft()

    def count(self) -> None:
        """Count :attr:`nbytes` anew. See NOTE [ Torn bookkeeping ]."""
        reading = sum(reload.nbytes for reload in self._alive if reload.device_copy is None)
        copies = {one.device_copy for one in self._alive if one.device_copy is not None}
        self.nbytes = reading + sum(one.nbytes for one in copies)
