"""Queues copies in order, and nothing else: here streams are made to wait for each other.

NOTE [ Order ]
    Offload: d2h waits for compute and for the last user of the host buffer, then copies.
    Reload:  the target is allocated on the compute stream; h2d waits for compute (earlier users of
             that memory) and for ``offloaded``, then copies.
    Use:     the live compute stream waits for ``reloaded``.

NOTE [ Side streams ]
    A group may be committed on one stream before that has waited for another one, which computed
    some of its tensors. So d2h waits for each stream that a tensor was saved on. Where compute
    gathers, it waits for them before, and they wait for it behind. Where sources are let go before
    their copy is known to be over, all of these streams wait for that copy.

NOTE [ Brought once ]
    A tensor that several groups saved is copied out once, and its tickets share the bytes. It is
    also brought back once for all tickets that wait for it within the window: a ticket uses the
    memory of another, which goes when the last of them has used it. If a backward has changed that
    memory in place, the next ticket brings its own.

Tiers are given this, and call it with the lock held.

    copies.copy_to_host(tickets, blocks)     # they have their places in host memory
    copies.copy_to_device(tickets)           # from there
    copies.wait_once(compute, arrival)       # before they are used
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import Tensor

from pp_offload._core.tensors import flat_bytes
from pp_offload._memory.buffers import HostBuffer
from pp_offload._transfer.block import Block, BlockState
from pp_offload._transfer.in_flight import InFlight
from pp_offload._transfer.listeners import Listeners
from pp_offload._transfer.pending_reloads import PendingReloads
from pp_offload._transfer.stopwatch import Stopwatch
from pp_offload._transfer.ticket import Arrival, SavedActivation, Ticket
from pp_offload.backends import Backend, Event, Stream

Queue = Callable[[Sequence[Ticket], Stream], None]
"""Brings payloads to a stream."""


class Copies:
    """Copies between one device and host memory, in an order that cannot be wrong.

    Args:
        backend: Streams, events and copies of the device.
        max_in_flight_bytes: See :class:`InFlight`.

    Attributes:
        lock: See NOTE [ One lock ].
        listeners: The engine's; told here what is queued.
        in_flight: What is on its way to the host.
        reloads: What is on the device again, or on its way there.
        stopwatch: Times copies and waits where it runs.
    """

    def __init__(self, backend: Backend, max_in_flight_bytes: int | str) -> None:
        self.backend = backend
        self.lock = threading.RLock()
        self.listeners = Listeners()
        self.stopwatch = Stopwatch(backend)
        self.in_flight = InFlight(backend, self.lock, self.stopwatch, max_in_flight_bytes)
        self.reloads = PendingReloads(backend.h2d)
        self._of_graphs: list[Block] = []

    # To the host

    def copy_to_host(self, tickets: Sequence[Ticket], blocks: Sequence[Block]) -> int:
        """Copy tickets into the buffers of ``blocks``, where they have their places.

        Returns:
            Bytes.
        """
        streams = self.compute_streams(tickets)
        buffers = buffers_of(blocks)
        sources = list(map(attrgetter("payload"), tickets))  # no loop in Python: thousands may come
        targets = list(map(attrgetter("host_bytes"), tickets))
        nbytes = sum(map(attrgetter("nbytes"), tickets))
        if None in map(attrgetter("storage"), tickets):
            sources = self._gathered(tickets)
        for stream in streams:
            self._d2h_waits_for_compute(stream)
        self._d2h_waits_for_last_users(buffers)
        pending = self.in_flight.begin(sources, blocks, streams, nbytes)
        offloaded = self._copy(self.backend.d2h, tickets, targets, sources, blocks, buffers)
        for block in blocks:
            block.offloaded = offloaded
            block.move_to(BlockState.ON_HOST)
        for buffer in buffers:
            buffer.before = ()
        if offloaded.query():
            self.in_flight.drop_last(pending)
        else:
            self.keep_sources(tickets, sources, streams[0])
            pending.offloaded = offloaded
        return nbytes

    def _gathered(self, tickets: Sequence[Ticket]) -> list[Tensor]:
        """The bytes to copy. A gather runs here, in order with all streams that saved them."""
        with self.reading([ticket for ticket in tickets if ticket.storage is None]):
            return [ticket.source() for ticket in tickets]

    @staticmethod
    def keep_sources(tickets: Sequence[Ticket], sources: Sequence[Tensor], stream: Stream) -> None:
        """Until the queued copies have run: let sources be taken back on ``stream``, and watch for
        harm.
        """
        for ticket, source in zip(tickets, sources, strict=True):
            block, address = ticket.block, source.data_ptr()
            if isinstance(ticket, SavedActivation):  # nearly always
                block.sources[ticket.begin] = source, address, ticket.version, ()
            else:
                held = [(one.held, one.version) for one in ticket.members]
                others = [(one, version) for one, version in held if isinstance(one, Tensor)]
                block.sources[ticket.begin] = source, address, source._version, others
            block.stream = stream

    def compute_streams(self, tickets: Sequence[Ticket]) -> list[Stream]:
        """The live compute stream, then others that saved these; see NOTE [ Side streams ]."""
        streams = [self.backend.current_stream()]
        live = streams[0]
        for ticket in tickets:
            for member in (ticket,) if isinstance(ticket, SavedActivation) else ticket.members:
                stream = member.stream
                if stream is not live and stream is not None and stream not in streams:
                    streams.append(stream)
        return streams

    @contextmanager
    def reading(self, tickets: Sequence[Ticket]) -> Iterator[None]:
        """Inside, compute may read these tickets' sources: it is ordered with all their streams."""
        live, *sides = self.compute_streams(tickets)
        for side in sides:
            live.wait_event(side.record_event())
        try:
            yield
        finally:  # what was queued before it raised reads memory that goes back to these streams
            for side in sides:
                side.wait_event(live.record_event())

    # To the device

    def copy_to_device(self, tickets: Sequence[Ticket]) -> int:
        """Bring payloads from the buffers of their blocks.

        Returns:
            How many are copied; those that share bytes count once.
        """
        return self.bring(tickets, self._queue_reload)

    def bring(self, tickets: Sequence[Ticket], queue: Queue) -> int:
        """Have ``queue`` bring payloads to the live stream; see NOTE [ Brought once ].

        Of tickets with the same bytes, ``queue`` gets the first. The others share its memory.

        Args:
            tickets: Whose payloads are to come.
            queue: Calls :meth:`PendingReloads.begin`, then queues the copies that fill the memory.

        Returns:
            How many it brought.
        """
        live = self.backend.current_stream()
        batch, sharers = self._first_of_each(tickets, live)
        if batch:
            queue(batch, live)
            nbytes = sum(map(attrgetter("nbytes"), batch))
            for heard in self.listeners.reload_started:
                heard(batch[0].label, nbytes)
        if not sharers:
            return len(batch)
        left = [ticket for ticket in sharers if not self.reloads.share(ticket, live)]
        return len(batch) + (self.bring(left, queue) if left else 0)

    def _first_of_each(
        self, tickets: Sequence[Ticket], live: Stream
    ) -> tuple[list[Ticket], list[Ticket]]:
        """Tickets whose bytes are to be brought, and those that will share the memory of these."""
        batch: list[Ticket] = []
        sharers: list[Ticket] = []
        chosen: set[tuple[int, int]] = set()
        for ticket in tickets:
            block, begin = ticket.block, ticket.begin
            if begin not in block.shared:
                batch.append(ticket)
            elif (id(block), begin) in chosen:
                sharers.append(ticket)
            elif not self.reloads.share(ticket, live):
                chosen.add((id(block), begin))
                batch.append(ticket)
        return batch, sharers

    def _queue_reload(self, tickets: Sequence[Ticket], stream: Stream) -> None:
        """Copy from the buffers of their blocks into new memory on the device."""
        device = self.backend.device
        blocks: dict[Block, None] = {}  # fewer than tickets, which share them
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for ticket in tickets:
            blocks[ticket.block] = None
            sources.append(ticket.host_bytes)
            targets.append(torch.empty_like(ticket.host_bytes, device=device))
        arrival = self.reloads.begin(tickets, targets, stream)
        self._h2d_waits_for_compute(stream)
        self._h2d_waits_for_offloaded(blocks)
        h2d, buffers = self.backend.h2d, buffers_of(blocks)
        arrival.reloaded = self._copy(h2d, tickets, targets, sources, blocks, buffers)

    def give_up(self, tickets: Sequence[Ticket]) -> None:
        """Forget the reloads of these tickets: what came, or was to come, is of no use."""
        for ticket in tickets:
            if ticket.reload is not None:
                self.reloads.give_up(ticket.reload)

    # Both

    def _copy(
        self,
        stream: Stream,
        tickets: Sequence[Ticket],
        targets: list[Tensor],
        sources: list[Tensor],
        blocks: Collection[Block],
        buffers: Sequence[HostBuffer],
    ) -> Event:
        """Queue copies on ``stream``, and make them the last uses of the buffers. It waits for the
        earlier ones.
        """
        queued = Queued(stream)
        for buffer in buffers:
            buffer.last_use = queued
        for block in blocks:
            if not block.has_addresses:  # hardly ever
                targets, sources = in_pieces(tickets, targets, sources)
                break
        event = self.stopwatch.copy(stream, targets, sources, tickets)
        for buffer in buffers:
            buffer.last_use = event
        if self.backend.is_capturing:
            self._of_graphs += blocks  # their graph, launched again, copies to or from there
        return event

    def poll(self) -> None:
        """Let go of what finished copies kept alive. Never blocks."""
        in_flight, reloads = self.in_flight, self.reloads
        if in_flight.queue:  # this is called so often that calls for nothing count
            in_flight.poll()
        if reloads.gone or reloads.abandoned:
            reloads.poll()

    def join(self) -> None:
        """Make the live compute stream wait for all copies queued so far.

        Each copy stream becomes part of the capture it is in, if there is one, and rejoins it.
        """
        live = self.backend.current_stream()
        for side in (self.backend.d2h, self.backend.h2d):
            side.wait_event(live.record_event())
            live.wait_event(side.record_event())
        self.backend.joined()

    def wait_once(self, live: Stream, arrival: Arrival) -> None:
        """Make the live stream wait for payloads that come, once for all that come together.

        Not to be called with the lock held: it blocks where the device is the host.
        """
        if arrival.is_there or arrival.reloaded is None:
            return
        self._compute_waits_for(live, arrival.reloaded)
        arrival.is_there = True

    def _compute_waits_for(self, stream: Stream, event: Event) -> None:
        self.stopwatch.wait(stream, event)

    def _d2h_waits_for_compute(self, stream: Stream) -> None:
        self.backend.d2h.wait_event(stream.record_event())

    def _h2d_waits_for_compute(self, stream: Stream) -> None:
        """For earlier users of the memory that it will write."""
        self.backend.h2d.wait_event(stream.record_event())

    def _h2d_waits_for_offloaded(self, blocks: Iterable[Block]) -> None:
        seen: Event | None = None
        for block in blocks:
            if block.offloaded is not None and block.offloaded is not seen:
                seen = block.offloaded
                self.backend.h2d.wait_event(seen)

    def _d2h_waits_for_last_users(self, buffers: Sequence[HostBuffer]) -> None:
        """Make d2h wait for copies that still read the buffers it is about to write.

        A host tier on one compute stream is safe without: the buffer's tickets are gone, so compute
        has waited for the reload from it, or nobody will use that; and d2h waits for compute. Two
        cases need the wait: a forward on another stream than the backward whose reloads read the
        buffer, and staging buffers, which are free as soon as their copy to the device is queued.
        """
        seen: Event | None = None
        for buffer in buffers:
            event = buffer.last_use
            if event is not None and event is not seen and not event.query():
                self.backend.d2h.wait_event(known(event))
            seen = event
            for event in buffer.before:
                self.backend.d2h.wait_event(known(event))


class Queued:
    """Stands for the event behind copies that are about to be queued on a stream.

    It is there before the copies, so that an interrupt cannot lose them. Whoever asks first records
    the event, behind all that the stream was given by then. See NOTE [ Torn bookkeeping ].
    """

    __slots__ = ("_event", "_stream")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._event: Event | None = None

    @property
    def event(self) -> Event:
        """One of the backend's own, which a stream can wait for."""
        if self._event is None:
            self._event = self._stream.record_event()
        return self._event

    def query(self) -> bool:
        """Whether it has ended."""
        return self.event.query()

    def synchronize(self) -> None:
        """Block until it has."""
        self.event.synchronize()


def buffers_of(blocks: Iterable[Block]) -> list[HostBuffer]:
    """Their host memory."""
    found = []  # a comprehension would be a call for each group, both ways
    for block in blocks:
        if block.loan is not None:
            found.append(block.loan.buffer)
    return found


def in_pieces(
    tickets: Sequence[Ticket], targets: list[Tensor], sources: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Targets and sources of copies; those of a payload in several host pieces are cut like them.

    On one side all are contiguous, and on the other the host bytes of the tickets.
    """
    cut_targets: list[Tensor] = []
    cut_sources: list[Tensor] = []
    for ticket, target, source in zip(tickets, targets, sources, strict=True):
        place = ticket.host_bytes
        if place.is_meta:
            pieces = ticket.pieces()
            cut_targets += pieces if target is place else cut_like(pieces, target)
            cut_sources += pieces if source is place else cut_like(pieces, source)
        else:
            cut_targets.append(target)
            cut_sources.append(source)
    return cut_targets, cut_sources


def cut_like(pieces: Sequence[Tensor], tensor: Tensor) -> Sequence[Tensor]:
    """The bytes of a contiguous tensor, in parts as long as ``pieces``; no copy."""
    return flat_bytes(tensor).split([piece.numel() for piece in pieces])


def record(stream: Stream) -> Event:
    """A new event on ``stream``."""
    return stream.record_event()


def known(event: Event) -> Event:
    """The backend's own event: a :class:`Queued`, left by an interrupt, records one."""
    return event.event if isinstance(event, Queued) else event


def wait(stream: Stream, event: Event | None) -> None:
    """Make ``stream`` wait for ``event``, if there is one."""
    if event is not None:
        stream.wait_event(event)
