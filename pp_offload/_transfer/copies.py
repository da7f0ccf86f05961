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
    also brought back once for all tickets that wait for it within the window: a ticket takes the
    device copy made for another, whose memory goes when the last of them has used it. If a backward
    has changed that device copy in place, the next ticket brings its own.

Tiers are given this, and call it with the lock held.

    copies.copy_to_host(tickets, host_copies)   # they have their places in host memory
    copies.copy_to_device(tickets)              # from there
    copies.wait_once(compute, device_copy.reloaded)  # before they are used
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from pp_offload._transfer.in_flight import InFlight
from pp_offload._transfer.listeners import Listeners
from pp_offload._transfer.pending_offloads import Queued
from pp_offload._transfer.pending_reloads import PendingReloads
from pp_offload._transfer.tensors import flat_bytes
from pp_offload._transfer.ticket import DeviceCopy, HostCopy, Ticket
from pp_offload.backends import Backend, Event, Stream

_nothing = nullcontext()


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
    """

    def __init__(self, backend: Backend, max_in_flight_bytes: int | None) -> None:
        self.backend = backend
        self.lock = threading.RLock()
        self.listeners = Listeners()
        self.in_flight = InFlight(backend, self.lock, max_in_flight_bytes)
        self.reloads = PendingReloads()
        self._waited: tuple[Event, Stream] | None = None
        self._of_graphs: list[HostCopy] = []

    # To the host

    def copy_to_host(self, tickets: Sequence[Ticket], copies: Sequence[HostCopy]) -> int:
        """Copy tickets into the buffers of ``copies``, where they have their places.

        Returns:
            Bytes.
        """
        targets: list[Tensor] = []
        parts: list[Tensor] = []
        nbytes = 0
        streams = self.compute_streams(tickets)
        sources = self._sources(tickets, streams)
        for ticket, source in zip(tickets, sources, strict=True):
            nbytes += ticket.nbytes
            target = ticket.host_bytes
            assert target is not None, "it has no place"
            if target.is_meta:
                pieces = ticket.pieces()
                targets += pieces
                parts += cut_like(pieces, source)
            else:
                targets.append(target)
                parts.append(source)
        for stream in streams:
            self._d2h_waits_for_compute(stream)
        self._d2h_waits_for_last_users(copies)
        pending = self.in_flight.begin(sources, copies, streams, nbytes)
        self._note_uses(copies, self.backend.d2h)
        self.backend.copy(self.backend.d2h, targets, parts, tickets[0].label)
        offloaded = self.backend.d2h.record_event()
        for copy in copies:
            copy.note_use(offloaded)
        if self.backend.is_capturing:
            self._of_graphs += copies  # their graph, launched again, copies to the same place
        if offloaded.query():
            self.in_flight.offloads.drop_last(pending)
        else:
            self.keep_sources(tickets, sources, streams[0])
            pending.offloaded = offloaded
        return nbytes

    def _sources(self, tickets: Sequence[Ticket], streams: Sequence[Stream]) -> list[Tensor]:
        """The bytes to copy. A gather runs here, in order with all ``streams``."""
        gathered = [t for t in tickets if t.storage is None] if len(streams) > 1 else []
        with self.reading(gathered) if gathered else _nothing:
            return [ticket.source() for ticket in tickets]

    def keep_sources(
        self, tickets: Sequence[Ticket], sources: Sequence[Tensor], stream: Stream
    ) -> None:
        """Until the queued copies have run: let sources be taken back, and watch for changes."""
        for ticket, source in zip(tickets, sources, strict=True):
            assert ticket.copy is not None
            ticket.copy.keep_source(ticket.begin, source, stream)
            ticket.watch()

    def compute_streams(self, tickets: Sequence[Ticket]) -> list[Stream]:
        """The live compute stream, then others that saved these; see NOTE [ Side streams ]."""
        streams = [self.backend.current_stream()]
        live = streams[0]
        for ticket in tickets:
            for member in ticket.members:
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
        """Bring payloads from the buffers of their copies.

        Returns:
            How many are copied; those that share bytes count once.
        """
        return self.bring(tickets, self._queue_reload)

    def bring(
        self, tickets: Sequence[Ticket], queue: Callable[[Sequence[Ticket], Stream], None]
    ) -> int:
        """Have ``queue`` bring payloads to the live stream; see NOTE [ Brought once ].

        Of tickets with the same bytes, ``queue`` gets the first. The others share its device copy.

        Args:
            tickets: Whose payloads are to come.
            queue: Calls :meth:`PendingReloads.begin` for each, then queues the copy that fills its
                memory.

        Returns:
            How many it brought.
        """
        num, live, share = 0, self.backend.current_stream(), self.reloads.share
        left = list(tickets)
        while left := [ticket for ticket in left if not share(ticket, live)]:
            batch = list({ticket.where: ticket for ticket in reversed(left)}.values())[::-1]
            queue(batch, live)
            num += len(batch)
            nbytes = sum([ticket.nbytes for ticket in batch])
            for heard in self.listeners.reload_started:
                heard(batch[0].label, nbytes)
            left = [ticket for ticket in left if ticket.device_tensor is None]
        return num

    def _queue_reload(self, tickets: Sequence[Ticket], stream: Stream) -> None:
        """Copy from the buffers of their copies into new memory on the device."""
        device = self.backend.device
        copies: dict[HostCopy, None] = {}  # fewer than tickets, which share them
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        device_copies: list[DeviceCopy] = []
        for ticket in tickets:
            copy, source = ticket.copy, ticket.host_bytes
            assert copy is not None and source is not None, "reload before offload"
            copies[copy] = None
            target = torch.empty_like(source, device=device)
            device_copies.append(self.reloads.begin(ticket, target, stream))
            if source.is_meta:
                pieces = ticket.pieces()
                sources += pieces
                targets += cut_like(pieces, target)
            else:
                sources.append(source)
                targets.append(target)
        self._h2d_waits_for_compute(stream)
        self._h2d_waits_for_offloaded(copies)
        self._note_uses(copies, self.backend.h2d)
        self.backend.copy(self.backend.h2d, targets, sources, tickets[0].label)
        reloaded = self.backend.h2d.record_event()
        for copy in copies:
            assert copy.buffer is not None, "not in host memory"
            copy.buffer.last_use = reloaded
        for device_copy in device_copies:
            device_copy.reloaded = reloaded
        if self.backend.is_capturing:
            self._of_graphs += copies

    def give_up(self, tickets: Sequence[Ticket]) -> None:
        """Forget the reloads of these tickets: what came, or was to come, is of no use."""
        for ticket in tickets:
            if ticket.pending_reload is not None:
                self.reloads.give_up(ticket.pending_reload, self.backend.h2d)

    # Both

    def poll(self) -> None:
        """Let go of what finished copies kept alive. Never blocks."""
        offloads, d2h = self.in_flight.offloads, self.backend.d2h
        while offloads.is_first_over(d2h):
            offloads.finish(offloads.first)
        self.reloads.poll(self.backend.h2d)

    def join(self) -> None:
        """Make the live compute stream wait for all copies queued so far.

        Each copy stream becomes part of the capture it is in, if there is one, and rejoins it.
        """
        live = self.backend.current_stream()
        for side in (self.backend.d2h, self.backend.h2d):
            side.wait_event(live.record_event())
            live.wait_event(side.record_event())
        self.backend.joined()

    def wait_once(self, live: Stream, reloaded: Event) -> None:
        """Make the live stream wait for an event, once for all payloads that share it."""
        waited = self._waited
        if waited is None or waited[0] is not reloaded or waited[1] != live:
            self._compute_waits_for(live, reloaded)
            self._waited = reloaded, live

    def _compute_waits_for(self, stream: Stream, event: Event) -> None:
        start = time.perf_counter()
        stream.wait_event(event)
        seconds = time.perf_counter() - start
        with self.lock:
            for heard in self.listeners.waited:
                heard(seconds)

    def _d2h_waits_for_compute(self, stream: Stream) -> None:
        self.backend.d2h.wait_event(stream.record_event())

    def _h2d_waits_for_compute(self, stream: Stream) -> None:
        self.backend.h2d.wait_event(stream.record_event())

    def _h2d_waits_for_offloaded(self, copies: Iterable[HostCopy]) -> None:
        seen: Event | None = None
        for copy in copies:
            if copy.offloaded is not None and copy.offloaded is not seen:
                seen = copy.offloaded
                self.backend.h2d.wait_event(seen)

    @staticmethod
    def _note_uses(copies: Iterable[HostCopy], stream: Stream) -> None:
        """Make copies that are about to be queued on ``stream`` the last uses of their buffers.

        ``stream`` waits for the earlier uses already.
        """
        queued = Queued(stream)
        for copy in copies:
            buffer = copy.buffer
            assert buffer is not None, "not in host memory"
            buffer.last_use = queued

    def _d2h_waits_for_last_users(self, copies: Sequence[HostCopy]) -> None:
        """Make d2h wait for copies that still read the buffers it is about to write.

        A host tier on one compute stream is safe without: the buffer's tickets are gone, so compute
        has waited for the reload from it, or nobody will use that; and d2h waits for compute. Two
        cases need the wait: a forward on another stream than the backward whose reloads read the
        buffer, and staging buffers, which are free as soon as their copy to the device is queued.
        """
        seen: Event | None = None
        for copy in copies:
            buffer = copy.buffer
            assert buffer is not None, "it has no buffer"
            event = buffer.last_use
            if event is not None and event is not seen and not event.query():
                self.backend.d2h.wait_event(known(event))
            seen = event
            for event in buffer.before:
                self.backend.d2h.wait_event(known(event))


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
