"""The order of copies and compute: nothing else records events or makes a stream wait.

NOTE [ Order ]
    Offload: d2h waits for compute and for the last user of the host buffer, then copies.
    Reload:  the target is allocated on the compute stream; h2d waits for compute (earlier users of
             that memory) and for ``offloaded``, then copies.
    Use:     the live compute stream waits for ``reloaded``.

NOTE [ Keep-alive ]
    What a copy reads stays referenced until its event has passed: let go without a wait when the
    event says so, or after a stream-ordered wait when too many bytes are in flight. The memory
    returns to the stream it was allocated on, which need not be the one that saved it, so every
    compute stream on which a group was started or offloaded waits. The same holds for a target
    nobody used, on the stream it was allocated on. ``record_stream`` is not used: it makes memory
    non-deterministic.

    While it is referenced, whoever wants the bytes back takes the source, not the copy.

NOTE [ Side streams ]
    A group may be committed on one stream while what another one computed of it is not waited for
    yet. So d2h waits for each stream that a tensor was saved on, and where compute has to gather,
    it waits for them and they for it. Memory that is let go early is let go on all of them.

NOTE [ Modified while queued ]
    A source changed in place before its copy has run would be copied wrong. Its version counter
    tells: it is compared when the source is let go, and when somebody wants the bytes before.

NOTE [ Plain copies ]
    What is no payload of a group, such as parameters and their gradients, is brought and sent by
    the same rules. The host, not a stream, waits for such a copy: whoever writes the host side
    afterwards is the program, which knows of no event. Two threads of a backward may ask.

    transfer.offload(tickets)           # at the end of a group's forward
    transfer.prefetch(tickets)          # some time before its backward
    tensor = transfer.deliver(ticket)   # when autograd asks
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pp_offload.backends import Backend, Event, Stream
from pp_offload.errors import DiskTierError, SavedTensorModifiedError
from pp_offload.tensors import flat_bytes
from pp_offload.ticket import HostCopy, Ticket, packs, place
from pp_offload.tiers.disk import DiskStatistics
from pp_offload.tiers.host import HostTier
from pp_offload.tiers.room import host_room

MAX_ABANDONED = 8
"""Landed payloads nobody used that may wait for their event."""


_nothing = nullcontext()


@dataclass(slots=True)
class Flight:
    """A batch that leaves the device, with the sources that must outlive the copy."""

    payloads: list[Tensor]
    copies: list[weakref.ref[HostCopy]]
    offloaded: Event
    nbytes: int
    then: list[Callable[[], None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Arrival:
    """Plain copies under way. See NOTE [ Plain copies ]."""

    tensors: list[Tensor]
    """They hold no data until :meth:`TransferEngine.settle` has returned."""

    event: Event
    """Behind the copies."""

    home: Stream
    """The compute stream it was asked for on; on the device, the tensors belong to it."""


@dataclass
class TransferCounters:
    """What was moved since the engine was made."""

    bytes_offloaded: int = 0
    bytes_reloaded: int = 0
    prefetched_reloads: int = 0
    on_demand_reloads: int = 0
    taken_back: int = 0
    consumer_wait_ms: float = 0.0


class TransferEngine:
    """Moves payloads between one device and host memory, in an order that cannot be wrong.

    Args:
        backend: Streams, events and copies of the device.
        host: Where the bytes go.
        max_in_flight_bytes: Device bytes that may wait for their copy to the host.
    """

    def __init__(self, backend: Backend, host: HostTier, max_in_flight_bytes: int) -> None:
        self.backend = backend
        self.host = host
        self.counters = TransferCounters()
        self.landed_bytes = 0
        self.in_flight_bytes = 0
        self.refill_below_bytes = 0
        self._max_in_flight_bytes = max_in_flight_bytes
        self._flights: deque[Flight] = deque()
        self._homes: list[Stream] = [backend.current_stream()]
        self._abandoned: deque[tuple[Tensor, Event, Stream]] = deque()
        self._waited: tuple[Event, Stream] | None = None
        self._of_graphs: list[HostCopy] = []
        self._plain: list[tuple[Event, Sequence[Tensor]]] = []
        self._lock = threading.Lock()

    def follow(self, stream: Stream) -> None:
        """What is offloaded may have been allocated on this compute stream."""
        if stream is not self._homes[-1] and stream not in self._homes:
            if not self.backend.is_capturing:
                self._homes.append(stream)

    def offload(self, tickets: Sequence[Ticket]) -> int:
        """Queue the copies of a group to the host; the sources are kept alive until they ran.

        Args:
            tickets: At least one, none offloaded before.

        Returns:
            Bytes.

        Raises:
            MemoryError: The host has no room. Nothing was queued; the tickets are as before.
        """
        self.poll()
        host = self.host
        copies = [place(one, HostCopy(host, host.take(n, len(one)))) for one, n in packs(tickets)]
        return self._queue_offload(tickets, copies)

    def _queue_offload(self, tickets: Sequence[Ticket], copies: Sequence[HostCopy]) -> int:
        """Copy tickets into the buffers of ``copies``, where they have their places."""
        targets: list[Tensor] = []
        parts: list[Tensor] = []
        nbytes = 0
        homes = self.homes(tickets)
        gathered = [t for t in tickets if t.storage is None] if len(homes) > 1 else []
        with self.reading(gathered) if gathered else _nothing:
            sources = [ticket.source() for ticket in tickets]
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
        for home in homes:
            self._d2h_waits_for_compute(home)
        self._d2h_waits_for_last_users(copies)
        self.backend.copy(self.backend.d2h, targets, parts, tickets[0].label)
        offloaded = self.backend.d2h.record_event()
        for copy in copies:
            assert copy.buffer is not None, "it has no buffer"
            copy.offloaded = copy.buffer.last_use = offloaded
            copy.buffer.before = ()
        if self.backend.is_capturing:
            self._of_graphs += copies  # their graph, launched again, copies to the same place
        if offloaded.query():
            self.counters.bytes_offloaded += nbytes
        else:
            self._depart(tickets, copies, sources, offloaded, homes, nbytes)
        return nbytes

    def _depart(
        self,
        tickets: Sequence[Ticket],
        copies: Sequence[HostCopy],
        sources: list[Tensor],
        offloaded: Event,
        homes: list[Stream],
        nbytes: int,
    ) -> None:
        """The copies are queued: keep and watch their sources until they were made."""
        for ticket, source in zip(tickets, sources, strict=True):
            assert ticket.copy is not None
            ticket.copy.lend(ticket.begin, source, homes[0])
            ticket.watch()
        refs = [weakref.ref(copy) for copy in copies]
        self.counters.bytes_offloaded += nbytes
        self.in_flight_bytes += nbytes
        for home in homes:
            self.follow(home)
        self._keep_alive(Flight(sources, refs, offloaded, nbytes))
        self._keep_in_flight_bounded()

    def reload(self, tickets: Sequence[Ticket]) -> None:
        """Queue the copies back to the device. Data is valid once :meth:`deliver` returned it."""
        self.poll()
        self._copy_back(tickets)

    def _copy_back(self, tickets: Sequence[Ticket]) -> None:
        """Copy from the buffers of their copies into new memory on the device."""
        home = self.backend.current_stream()
        device = self.backend.device
        copies: list[HostCopy] = []
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        landing: list[Tensor] = []
        for ticket in tickets:
            copy, source = ticket.copy, ticket.host_bytes
            assert copy is not None and source is not None, "reload before offload"
            copies.append(copy)
            target = torch.empty_like(source, device=device)
            landing.append(target)
            if source.is_meta:
                pieces = ticket.pieces()
                sources += pieces
                targets += cut_like(pieces, target)
            else:
                sources.append(source)
                targets.append(target)
        self._h2d_waits_for_compute(home)
        self._h2d_waits_for_offloaded(copies)
        self.backend.copy(self.backend.h2d, targets, sources, tickets[0].label)
        reloaded = self.backend.h2d.record_event()
        for copy in copies:
            assert copy.buffer is not None, "not in host memory"
            copy.buffer.last_use = reloaded
        if self.backend.is_capturing:
            self._of_graphs += copies
        self._land(tickets, landing, reloaded, home)

    def _land(
        self,
        tickets: Sequence[Ticket],
        targets: Sequence[Tensor],
        reloaded: Event,
        home: Stream,
    ) -> None:
        """The copies into ``targets`` are queued; they are done at ``reloaded``."""
        nbytes = counted = 0
        for ticket, target in zip(tickets, targets, strict=True):
            assert ticket.landed is None, "it is there already"
            ticket.landed = target
            ticket.reloaded = reloaded
            ticket.home = home
            nbytes += ticket.nbytes
            if ticket.reading:
                ticket.reading = False
                counted += ticket.nbytes  # when reading began
        self.landed_bytes += nbytes - counted
        self.counters.bytes_reloaded += nbytes

    def prefetch(self, tickets: Sequence[Ticket]) -> None:
        """A reload ahead of its use."""
        self.counters.prefetched_reloads += len(tickets)
        self.reload(tickets)

    def deliver(self, ticket: Ticket) -> Tensor:
        """The payload on the device, ready for the live compute stream.

        Reloads it now if nobody did before, or if it was reloaded for another stream, whose
        memory this one must not outlive. While the copy to the host is still to be made, its
        source is there, and is taken back as it is.

        Raises:
            SavedTensorModifiedError: It was changed in place before it was copied.
        """
        copy = ticket.copy
        if copy is not None and (copy.watched is not None or copy.modified):
            self._check_unmodified(ticket, copy)
        live = self.backend.current_stream()
        if ticket.landed is not None and ticket.home != live:
            self.abandon(ticket)
        if ticket.num_waiting <= 0:  # another backward through the same graph
            ticket.num_waiting = ticket.num_members
        if ticket.landed is None:
            lent = ticket.lent
            if lent is not None and copy is not None and copy.home == live:
                return self._take_back(ticket, lent)
            if not ticket.reading:
                self.counters.on_demand_reloads += 1
            self.reload([ticket])
        landed = ticket.landed
        assert landed is not None
        reloaded = ticket.reloaded
        if reloaded is not None:
            if self._waited is None or self._waited[0] is not reloaded or self._waited[1] != live:
                self._compute_waits_for(live, reloaded)
                self._waited = reloaded, live
            ticket.reloaded = None
        ticket.num_waiting -= 1
        if ticket.num_waiting > 0 or ticket.version is not None:
            self._check_not_used_up(ticket, landed)
        if ticket.num_waiting <= 0:
            self._drop_landed(ticket)
        return landed

    def _take_back(self, ticket: Ticket, source: Tensor) -> Tensor:
        self.counters.taken_back += 1
        ticket.num_waiting -= 1
        shape = ticket.host_bytes
        assert shape is not None
        if source.shape == shape.shape and source.dtype == shape.dtype:
            return source
        return flat_bytes(source).view(shape.dtype).view(shape.shape)

    def _check_not_used_up(self, ticket: Ticket, landed: Tensor) -> None:
        """Of several users of a payload, one in backward may have changed it in place."""
        if ticket.version is None:
            ticket.version = landed._version
        elif ticket.version != landed._version:
            raise SavedTensorModifiedError(
                f"one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of group '{ticket.label}' with payload shape "
                f"{tuple(landed.shape)}, saved several times, was changed by a backward that used "
                "it before; use an out-of-place operation there"
            )

    def _check_unmodified(self, ticket: Ticket, copy: HostCopy) -> None:
        copy.check_unmodified()
        if ticket.begin in copy.modified and ticket.host_bytes is not None:
            raise SavedTensorModifiedError(
                f"a tensor of group '{ticket.label}' with payload shape "
                f"{tuple(ticket.host_bytes.shape)} was modified by an inplace operation after "
                "autograd saved it and before its bytes were copied; use an out-of-place operation "
                "there, or mark the tensor with mark_not_offloadable and see the error autograd "
                "raises for it"
            )

    def abandon(self, ticket: Ticket) -> None:
        """Give up a landed payload; its memory stays until the copy into it has run."""
        landed, reloaded, home = ticket.landed, ticket.reloaded, ticket.home
        self._drop_landed(ticket)
        if landed is not None and reloaded is not None and home is not None:
            self._abandoned.append((landed, reloaded, home))

    def homes(self, tickets: Sequence[Ticket]) -> list[Stream]:
        """The live compute stream, then others that saved these; see NOTE [ Side streams ]."""
        homes = [self.backend.current_stream()]
        live = homes[0]
        for ticket in tickets:
            for member in ticket.members:
                home = member.home
                if home is not live and home is not None and home not in homes:
                    homes.append(home)
        return homes

    @contextmanager
    def reading(self, tickets: Sequence[Ticket]) -> Iterator[None]:
        """Inside, compute reads what these tickets take, wherever that was computed."""
        live, *sides = self.homes(tickets)
        for side in sides:
            live.wait_event(side.record_event())
        yield
        for side in sides:
            side.wait_event(live.record_event())

    def bring(self, sources: Sequence[Tensor], label: str) -> Arrival:
        """Start copying host tensors to the device. See NOTE [ Plain copies ].

        Args:
            sources: At least one dense tensor on the host, none of which requires grad; not
                written until the copies are settled.
            label: For messages.

        Returns:
            Device tensors of the same shapes, dtypes and layouts.
        """
        home = self.backend.current_stream()
        with self._lock:
            self.poll()
            with torch.inference_mode(False):  # a thread is not in it, and may write them
                targets = [torch.empty_like(one, device=self.backend.device) for one in sources]
            self._h2d_waits_for_compute(home)
            self.backend.copy(self.backend.h2d, targets, list(sources), label)
            arrival = Arrival(targets, self.backend.h2d.record_event(), home)
            self._plain.append((arrival.event, [*sources, *targets]))
            self.counters.bytes_reloaded += sum(one.nbytes for one in sources)
        return arrival

    def send(self, sources: Sequence[Tensor], label: str) -> Arrival:
        """Start copying device tensors to new host memory. See NOTE [ Plain copies ].

        Args:
            sources: At least one strided tensor on the device; kept alive until they are copied.
            label: For messages.

        Returns:
            Host tensors of the same shapes and dtypes, in one allocation.
        """
        home = self.backend.current_stream()
        dense = [as_dense(source.detach()) for source in sources]
        nbytes = sum(one.nbytes for one in dense)
        with self._lock:
            self.poll()
            targets = host_room(dense, self.backend.allocate_host)
            self._d2h_waits_for_compute(home)
            self.backend.copy(self.backend.d2h, targets, dense, label)
            arrival = Arrival(targets, self.backend.d2h.record_event(), home)
            self.counters.bytes_offloaded += nbytes
            self.in_flight_bytes += nbytes
            self.follow(home)
            self._keep_alive(Flight(dense, [], arrival.event, nbytes))
            self._plain.append((arrival.event, targets))  # no stream's wait lets the host free them
            self._keep_in_flight_bounded()
        return arrival

    def settle(self, arrival: Arrival) -> list[Tensor]:
        """Block the host until the copies ran; the tensors, which hold their data now."""
        arrival.event.synchronize()
        with self._lock:
            self.poll()
        return arrival.tensors

    def after_copies(self, action: Callable[[], None]) -> None:
        """Run ``action`` when the sources of the copies queued so far have been let go."""
        self.poll()
        if self._flights:
            self._flights[-1].then.append(action)
        else:
            action()

    def poll(self) -> None:
        """Let go of what finished copies kept alive. Never blocks."""
        flights = self._flights
        while flights and flights[0].offloaded.query():
            self._arrive(flights.popleft())
        while self._abandoned and self._abandoned[0][1].query():
            self._abandoned.popleft()
        if self._plain:
            self._plain = [one for one in self._plain if not one[0].query()]

    def join(self) -> None:
        """Make the live compute stream wait for all copies queued so far.

        Each copy stream becomes part of the capture it is in, if there is one, and rejoins it.
        """
        live = self.backend.current_stream()
        for side in (self.backend.d2h, self.backend.h2d):
            side.wait_event(live.record_event())
            live.wait_event(side.record_event())
        self.backend.joined()

    def fit(self) -> None:
        """Between steps: make host memory as tight as what the steps needed."""
        self.poll()
        for tier in self.host_tiers:
            tier.fit()

    @property
    def host_tiers(self) -> tuple[HostTier, ...]:
        """All host memory it uses."""
        return (self.host,)

    def disk_statistics(self) -> DiskStatistics:
        """All zero: without a disk tier there is nothing."""
        return DiskStatistics()

    def release_idle(self) -> None:
        """Give host memory back to the system that no saved tensor needs; waits for copies."""
        for tier in self.host_tiers:
            tier.release_idle()

    def retire(self) -> None:
        """Another engine takes over: keep only what saved tensors that still live need."""
        self.release_idle()

    def __del__(self) -> None:
        """Host memory goes with it, and copies that nobody waits for may still read it."""
        with suppress(RuntimeError):  # the process may be ending, and its driver gone
            if not self.backend.is_capturing:
                self.backend.synchronize()

    def close(self) -> None:
        """Finish all copies, then drop the host memory."""
        self.backend.synchronize()
        self.poll()
        for tier in self.host_tiers:
            tier.close()

    def _d2h_waits_for_compute(self, home: Stream) -> None:
        self.backend.d2h.wait_event(home.record_event())

    def _h2d_waits_for_compute(self, home: Stream) -> None:
        self.backend.h2d.wait_event(home.record_event())

    def _h2d_waits_for_offloaded(self, copies: Sequence[HostCopy]) -> None:
        seen: Event | None = None
        for copy in copies:
            if copy.offloaded is not None and copy.offloaded is not seen:
                seen = copy.offloaded
                self.backend.h2d.wait_event(seen)

    def _keep_alive(self, flight: Flight) -> None:
        self._flights.append(flight)

    def _d2h_waits_for_last_users(self, copies: Sequence[HostCopy]) -> None:
        seen: Event | None = None
        for copy in copies:
            buffer = copy.buffer
            assert buffer is not None, "it has no buffer"
            event = buffer.last_use
            if event is not None and event is not seen and not event.query():
                self.backend.d2h.wait_event(event)
            seen = event
            for event in buffer.before:
                self.backend.d2h.wait_event(event)

    def _keep_in_flight_bounded(self) -> None:
        while self._flights and self.in_flight_bytes > self._max_in_flight_bytes:
            flight = self._flights.popleft()
            for home in (self.backend.current_stream(), *self._homes):
                home.wait_event(flight.offloaded)
            self._arrive(flight)
        while len(self._abandoned) > MAX_ABANDONED:
            _, reloaded, home = self._abandoned[0]
            with suppress(DiskTierError):  # nobody wants it
                home.wait_event(reloaded)
            self._abandoned.popleft()
        self.poll()

    def _arrive(self, flight: Flight) -> None:
        self.in_flight_bytes -= flight.nbytes
        for ref in flight.copies:
            copy = ref()
            if copy is not None:
                copy.arrive()
        flight.payloads.clear()
        for action in flight.then:
            action()

    def _drop_landed(self, ticket: Ticket) -> None:
        if ticket.is_coming:
            self.landed_bytes -= ticket.nbytes
        ticket.reading = False
        ticket.landed = ticket.reloaded = ticket.home = ticket.version = None

    def _compute_waits_for(self, stream: Stream, event: Event) -> None:
        start = time.perf_counter()
        stream.wait_event(event)
        self.counters.consumer_wait_ms += (time.perf_counter() - start) * 1e3


def as_dense(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it if its elements are not all there in one piece of memory."""
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if is_dense(tensor) else tensor.clone()


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of a strided tensor are all there in one piece of memory, each once."""
    return tensor.stride() == torch.empty_like(tensor, device="meta").stride()


def cut_like(pieces: Sequence[Tensor], tensor: Tensor) -> Sequence[Tensor]:
    """The bytes of a contiguous tensor, in parts as long as ``pieces``; no copy."""
    return flat_bytes(tensor).split([piece.numel() for piece in pieces])


def record(stream: Stream) -> Event:
    """A new event on ``stream``."""
    return stream.record_event()


def wait(stream: Stream, event: Event | None) -> None:
    """Make ``stream`` wait for ``event``, if there is one."""
    if event is not None:
        stream.wait_event(event)
