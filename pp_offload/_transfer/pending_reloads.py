"""Reloaded payloads that are not used up, and unwanted ones whose copy still runs.

    arrival = reloads.begin(tickets, targets, stream)  # before the copies into them are queued
    tensor = reloads.take(ticket, reload, live)        # behind a wait, autograd gets it
    reloads.give_up(reload)                            # nobody wants it
    reloads.poll()                                     # tickets that are gone, copies that are over

NOTE [ Torn bookkeeping ]
    A signal handler may raise between any two lines. So the memory that a copy reads or writes is
    registered before the copy is queued, still without an event; code that finds no event there
    records one, behind all that is queued. An entry leaves a queue only after it was handled, and
    is handled a second time if an interrupt came between. Counters that steer may be off after an
    interrupt; they are counted anew between steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import repeat
from typing import Any

from torch import Tensor

from pp_offload._core.tensors import flat_bytes
from pp_offload._transfer.ticket import Arrival, Reload, Shared, Ticket
from pp_offload.backends import Event, Stream
from pp_offload.errors import TierError

MAX_ABANDONED = 8
"""How many unwanted payloads, whose copies may still run, are kept without a wait."""


class PendingReloads:
    """Payloads on the device, or on their way there, that autograd has not asked for.

    Args:
        h2d: The stream of copies to the device.

    Attributes:
        nbytes: Their bytes. See NOTE [ Torn bookkeeping ].
        refill_below_bytes: With fewer :attr:`nbytes`, more should be brought; prefetch sets it.
        refill: Brings more; prefetch sets it.
        comes_soon: Whether backward will ask for a ticket within the window; prefetch sets it.
        gone: Reloads of tickets that are gone.
        abandoned: Memory that nobody wants, the event behind the copy into it, and its stream.
    """

    def __init__(self, h2d: Stream) -> None:
        self.nbytes = 0
        self.refill_below_bytes = 0
        self.refill: Callable[[], None] = lambda: None
        self.comes_soon: Callable[[Ticket], bool] = lambda ticket: False
        self._h2d = h2d
        self._alive: set[Reload] = set()
        self.gone: deque[Reload] = deque()
        self.abandoned: deque[tuple[Tensor, Event, Stream]] = deque()

    def expect(self, tickets: Sequence[Ticket]) -> list[Reload]:
        """Register payloads that will come; :meth:`begin` may say later where."""
        return self._register(tickets, repeat(None), None)

    def begin(self, tickets: Sequence[Ticket], targets: list[Tensor], stream: Stream) -> Arrival:
        """Register copies of payloads into ``targets`` before they are queued.

        Args:
            tickets: Whose payloads they are.
            targets: The memory for each.
            stream: The compute stream it was allocated on.

        Returns:
            What is common to them; the caller sets its event behind the copies.
        """
        arrival = Arrival(stream)
        self._register(tickets, targets, arrival)
        return arrival

    def _register(
        self, tickets: Sequence[Ticket], targets: Iterable[Tensor | None], arrival: Arrival | None
    ) -> list[Reload]:
        found = []
        is_gone, lives, nbytes = self.gone.append, self._alive.add, 0
        for ticket, target in zip(tickets, targets, strict=False):
            reload = ticket.reload
            if reload is None:
                reload = Reload(ticket, is_gone)
                reload.nbytes, reload.shared, reload.version = ticket.nbytes, None, None
                reload.tensor, reload.arrival = target, arrival
                lives(reload)
                ticket.reload = reload
                nbytes += reload.nbytes
            elif arrival is not None:
                reload.tensor, reload.arrival = target, arrival
            found.append(reload)
        self.nbytes += nbytes
        return found

    # Several tickets of the same bytes

    def share(self, ticket: Ticket, live: Stream) -> bool:
        """Give ``ticket`` the memory of another with the same bytes, if it may use that."""
        other = self.same_bytes(ticket, live)
        if other is None:
            return False
        (reload,) = self.expect([ticket])
        other.shared = reload.shared = shared = other.shared or Shared(other)
        reload.tensor, reload.arrival = other.tensor, other.arrival
        shared.num_users += 1
        self.nbytes -= reload.nbytes
        return True

    def same_bytes(self, ticket: Ticket, live: Stream) -> Reload | None:
        """The reload of another ticket with the same bytes, if this one may use its memory."""
        for other in _others_of(ticket):
            reload = other.reload
            if reload is not None and reload.is_for(live) and reload.is_as_it_came:
                return reload
        return None

    def _pass_on(self, ticket: Ticket, live: Stream) -> None:
        """Before a ticket gives up its memory, pass it to one of the same bytes that comes soon."""
        for other in _others_of(ticket):
            if other.num_waiting > 0 and other.reload is None and self.comes_soon(other):
                self.share(other, live)
                return

    # Used, or not wanted

    def take(self, ticket: Ticket, reload: Reload, live: Stream) -> Tensor | None:
        """One use, on the live stream, of a payload that is there; the last one gives it up.

        Returns:
            None if another use has changed it in place.
        """
        shared, tensor = reload.shared, reload.tensor
        if tensor is None:
            return None
        version, given = tensor._version, (shared or reload).version
        if given is not None and given != version:
            return None
        reload.version = version
        if shared is not None:
            shared.version = version
        left = ticket.num_waiting
        ticket.num_waiting = left = (left if left > 0 else ticket.num_members) - 1  # NOTE [ Uses ]
        if left <= 0 and ticket.reload is reload:
            if ticket.block.shared:
                self._pass_on(ticket, live)
            if reload.shared is None and reload.arrival is not None and reload.arrival.is_there:
                ticket.reload = None  # nearly always; as give_up() does it, without a call
                self.nbytes -= reload.nbytes
                self._alive.discard(reload)
            else:
                self.give_up(reload)
        return tensor if shared is None else shaped_for(ticket, tensor)

    def give_up(self, reload: Reload) -> None:
        """Forget what nobody will use any more; its memory stays until the copy into it has run."""
        if reload not in self._alive:
            return
        ticket, shared = reload(), reload.shared
        if ticket is not None and ticket.reload is reload:
            ticket.reload = None
        if shared is None or shared.num_users <= 1:
            arrival, tensor = reload.arrival, reload.tensor
            if arrival is not None and tensor is not None and not arrival.is_there:
                event = arrival.reloaded or self._h2d.record_event()  # NOTE [ Torn bookkeeping ]
                self.abandoned.append((tensor, event, arrival.stream))
            self.nbytes -= reload.nbytes
        if shared is not None:
            shared.num_users -= 1
        self._alive.discard(reload)

    def poll(self) -> None:
        """Give up what was meant for tickets that are gone; forget copies that are over."""
        while self.gone:
            self.give_up(self.gone[0])
            self.gone.popleft()
        while self.abandoned and self.abandoned[0][1].query():
            self.abandoned.popleft()

    def events(self) -> list[Event]:
        """Events behind the copies to the device, also of what nobody wants."""
        arrivals = {one.arrival for one in self._alive if one.arrival is not None}
        alive = [one.reloaded for one in arrivals if one.reloaded is not None]
        return [*alive, *(event for _, event, _ in self.abandoned)]

    def keep_few_abandoned(self, lock: AbstractContextManager[Any]) -> None:
        """Let more than a few unwanted payloads go: their stream waits for the copies into them.

        Not to be called with the lock held: it blocks where the device is the host. Meanwhile
        another thread may have found the same one, and may have let it go.
        """
        while len(self.abandoned) > MAX_ABANDONED:
            with lock:
                oldest = self.abandoned[0] if len(self.abandoned) > MAX_ABANDONED else None
            if oldest is None:
                return
            _, reloaded, stream = oldest
            with suppress(TierError):  # nobody wants what could not be read
                stream.wait_event(reloaded)
            with lock:
                if self.abandoned and self.abandoned[0] is oldest:
                    self.abandoned.popleft()

    def count(self) -> None:
        """Count :attr:`nbytes` anew. See NOTE [ Torn bookkeeping ]."""
        self.nbytes = sum(one.nbytes for one in {one.shared or one for one in self._alive})


def _others_of(ticket: Ticket) -> Iterator[Ticket]:
    """Those of the same bytes: saved later, so brought and used earlier, come first."""
    for ref in reversed(ticket.block.shared.get(ticket.begin, ())):
        other = ref()
        if other is not None and other is not ticket:
            yield other


def shaped_for(ticket: Ticket, tensor: Tensor) -> Tensor:
    """Memory of another ticket in this one's shape and dtype, which may differ."""
    like = ticket.host_bytes
    if tensor.shape == like.shape and tensor.dtype == like.dtype:
        return tensor
    return flat_bytes(tensor).view(like.dtype).view(like.shape)
