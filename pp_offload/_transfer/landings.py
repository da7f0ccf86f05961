"""What was reloaded and not used up, and what nobody will use whose copy still runs.

    landing = landings.expect(ticket)          # before the copy into it is queued
    landings.give_up(landing)                  # used up, or nobody wants it
    landings.poll(h2d)                         # tickets that are gone, copies that are over

NOTE [ Torn bookkeeping ]
    A signal may raise between any two lines. So what a queued copy reads or writes is registered
    before it is queued, without an event; who finds it so records one behind all that is queued.
    What leaves a queue leaves it last, and is handled a second time where that did not happen.
    Counters that steer may be off after an interrupt; they are counted anew between steps.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from torch import Tensor

from pp_offload._transfer.ticket import Arrived, Landing, Ticket, Where
from pp_offload.backends import Event, Stream
from pp_offload.errors import DiskTierError

MAX_ABANDONED = 8
"""Landed payloads nobody used that may wait for their event."""


class Landings:
    """Payloads on the device, or on their way there, that autograd has not asked for.

    Attributes:
        nbytes: Their bytes. See NOTE [ Torn bookkeeping ].
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._alive: set[Landing] = set()
        self._arrived: dict[Where, Arrived] = {}
        self._gone: deque[Landing] = deque()
        self._abandoned: deque[tuple[Tensor, Event, Stream]] = deque()

    def expect(self, ticket: Ticket) -> Landing:
        """The payload of ``ticket`` will come; where, may be said later."""
        landing = Landing.of(ticket, self._gone)
        self._alive.add(landing)
        ticket.landing = landing
        self.nbytes += landing.nbytes
        return landing

    def land(self, ticket: Ticket, target: Tensor, home: Stream) -> Arrived:
        """A copy of its payload into ``target`` is about to be queued."""
        arrived = Arrived(target, ticket, home)
        self._arrived[arrived.where] = arrived
        landing = ticket.landing or self.expect(ticket)
        landing.arrived = arrived
        arrived.num_landings += 1
        return arrived

    def is_shared(self, ticket: Ticket, live: Stream) -> bool:
        """Have what landed for another ticket with the same bytes, if that is good for it."""
        arrived = self.same_bytes(ticket, live)
        if arrived is None:
            return False
        landing = ticket.landing or self.expect(ticket)
        landing.arrived = arrived
        arrived.num_landings += 1
        self.nbytes -= landing.nbytes
        return True

    def same_bytes(self, ticket: Ticket, live: Stream) -> Arrived | None:
        """What landed for another ticket with the same bytes, if that is good for this one."""
        arrived = self._arrived.get(ticket.where)
        if arrived is None or arrived.copy() is not ticket.copy or arrived.home != live:
            return None
        is_coming = arrived.is_there or arrived.reloaded is not None
        return arrived if is_coming and arrived.is_as_it_came else None

    def give_up(self, landing: Landing, h2d: Stream) -> None:
        """Nobody will use it any more; its memory stays until the copy into it has run."""
        if landing not in self._alive:
            return
        ticket, arrived = landing(), landing.arrived
        if ticket is not None and ticket.landing is landing:
            ticket.landing = None
        if arrived is None or arrived.num_landings <= 1:
            self._let_go(arrived, h2d)
            self.nbytes -= landing.nbytes
        else:
            arrived.num_landings -= 1
        self._alive.discard(landing)

    def _let_go(self, arrived: Arrived | None, h2d: Stream) -> None:
        if arrived is None:
            return
        if not arrived.is_there:
            event = arrived.reloaded or h2d.record_event()  # NOTE [ Torn bookkeeping ]
            self._abandoned.append((arrived.tensor, event, arrived.home))
        if self._arrived.get(arrived.where) is arrived:
            del self._arrived[arrived.where]

    def poll(self, h2d: Stream) -> None:
        """Give up what was meant for tickets that are gone; forget copies that are over."""
        while self._gone:
            self.give_up(self._gone[0], h2d)
            self._gone.popleft()
        while self._abandoned and self._abandoned[0][1].query():
            self._abandoned.popleft()

    def events(self) -> list[Event]:
        """Behind the copies into memory that somebody waits for, or nobody."""
        arrived = (one.arrived for one in self._alive)
        alive = [one.reloaded for one in arrived if one is not None and one.reloaded is not None]
        return [*alive, *(event for _, event, _ in self._abandoned)]

    def keep_few_abandoned(self) -> None:
        """Let memory that nobody wants go back to its stream, which waits for the copy into it."""
        while len(self._abandoned) > MAX_ABANDONED:
            _, reloaded, home = self._abandoned[0]
            with suppress(DiskTierError):  # nobody wants what could not be read
                home.wait_event(reloaded)
            self._abandoned.popleft()

    def count(self) -> None:
        """Count :attr:`nbytes` anew. See NOTE [ Torn bookkeeping ]."""
        reading = sum(landing.nbytes for landing in self._alive if landing.arrived is None)
        arrived = {one.arrived for one in self._alive if one.arrived is not None}
        self.nbytes = reading + sum(one.nbytes for one in arrived)
