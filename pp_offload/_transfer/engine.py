"""The order of copies and compute: nothing else records events or makes a stream wait.

NOTE [ Order ]
    Offload: d2h waits for compute and for the last user of the host buffer, then copies.
    Reload:  the target is allocated on the compute stream; h2d waits for compute (earlier users of
             that memory) and for ``offloaded``, then copies.
    Use:     the live compute stream waits for ``reloaded``.

NOTE [ One lock ]
    Backwards may run in any number of threads, beside forwards. One lock guards what the engine
    and its tiers know, and what groups, steps and prefetch know of them; it is held for bookkeeping
    and never while compute waits, which on a host that is the device blocks the thread, nor while
    the host waits for copies or threads. So what a wait is for stays registered until the wait is
    over, and who finds that there is something to wait for raises ``Unfinished``, having changed
    nothing, up to where no lock is held.

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

NOTE [ Brought once ]
    A tensor that several groups saved is copied out once, and its tickets share the bytes. It is
    also brought once for all of them that wait for it within the window: a ticket takes what has
    came for another, and the memory goes when the last of them has used it. One whose bytes were
    changed in place meanwhile, by a backward that was given them, brings its own.

    transfer.offload(tickets)           # at the end of a group's forward
    transfer.prefetch(tickets)          # some time before its backward
    tensor = transfer.deliver(ticket)   # when autograd asks
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from pp_offload._common.processes import check, current
from pp_offload._memory.disk import DiskStatistics
from pp_offload._memory.host import HostTier
from pp_offload._memory.unfinished import when_finished
from pp_offload._transfer.pending_offloads import PendingOffload, PendingOffloads, Queued
from pp_offload._transfer.pending_reloads import PendingReloads
from pp_offload._transfer.tensors import flat_bytes
from pp_offload._transfer.ticket import DeviceCopy, HostCopy, PendingReload, Ticket, packs, place
from pp_offload.backends import Backend, Event, Stream
from pp_offload.errors import OffloadError, SavedTensorModifiedError

logger = logging.getLogger(__name__)

IN_FLIGHT_BYTES = 2**29
"""On their way to the host, where nobody says how much may be."""

MAX_STREAMS = 32
"""Compute streams that are remembered; PyTorch hands out so many, again and again."""

_nothing = nullcontext()


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
        max_in_flight_bytes: Device bytes that may wait for their copy to the host, beside those
            that were sent last; None for twice the largest group, at least :data:`IN_FLIGHT_BYTES`.
            0 means that compute waits for each copy.

    Attributes:
        lock: See NOTE [ One lock ].
        refill_below_bytes: Below so many that came, more should be brought; who prefetches says.
        comes_soon: Whether backward will ask for a ticket within the window; who prefetches knows.
    """

    def __init__(self, backend: Backend, host: HostTier, max_in_flight_bytes: int | None) -> None:
        self.backend = backend
        self.host = host
        self.counters = TransferCounters()
        self.lock = threading.RLock()
        self.refill_below_bytes = 0
        self.comes_soon: Callable[[Ticket], bool] = lambda ticket: False
        self._follows_groups = max_in_flight_bytes is None
        self._max_in_flight_bytes = (
            IN_FLIGHT_BYTES if max_in_flight_bytes is None else max_in_flight_bytes
        )
        self._pending_offloads = PendingOffloads()
        self._pending_reloads = PendingReloads()
        self._compute_streams: tuple[Stream, ...] = (backend.current_stream(),)
        self._knows_all_streams = True
        self._waited: tuple[Event, Stream] | None = None
        self._of_graphs: list[HostCopy] = []
        self._owner = current()

    def check_process(self) -> None:
        """Copies and files do not follow a fork: only the process that made it may use the engine.

        Raises:
            ForkedError: This is another one.
        """
        check(self._owner, "what was offloaded")

    @property
    def reloaded_bytes(self) -> int:
        """Bytes on the device, or on their way there, that autograd has not asked for."""
        return self._pending_reloads.nbytes

    @property
    def in_flight_bytes(self) -> int:
        """Bytes on the device that are kept for their copy to the host."""
        return self._pending_offloads.nbytes

    def follow(self, stream: Stream) -> None:
        """What is offloaded may have been allocated on this compute stream."""
        streams = self._compute_streams
        if stream is streams[-1] or stream in streams or self.backend.is_capturing:
            return
        if len(streams) >= MAX_STREAMS:
            self._knows_all_streams = False
        self._compute_streams = (*streams, stream)[-MAX_STREAMS:]

    def offload(self, tickets: Sequence[Ticket]) -> int:
        """Queue the copies of a group to the host; the sources are kept alive until they ran.

        Args:
            tickets: At least one, none offloaded before.

        Returns:
            Bytes.

        Raises:
            MemoryError: The host has no room. Nothing was queued; the tickets are as before.
        """
        self.check_process()  # before the lock, which a thread that is not here may hold
        with self.lock:
            nbytes = self._offload(tickets)
        self._sent(nbytes)
        return nbytes

    def _sent(self, group_bytes: int) -> None:
        if self._follows_groups:
            self._max_in_flight_bytes = max(self._max_in_flight_bytes, 2 * group_bytes)
        self.keep_in_flight_bounded(group_bytes)

    def _offload(self, tickets: Sequence[Ticket]) -> int:
        self.poll()
        copies = [
            place(one, HostCopy(self.host.allocate(n, len(one)))) for one, n in packs(tickets)
        ]
        return self._queue_offload(tickets, copies)

    def _queue_offload(self, tickets: Sequence[Ticket], copies: Sequence[HostCopy]) -> int:
        """Copy tickets into the buffers of ``copies``, where they have their places."""
        targets: list[Tensor] = []
        parts: list[Tensor] = []
        nbytes = 0
        streams = self.compute_streams(tickets)
        gathered = [t for t in tickets if t.storage is None] if len(streams) > 1 else []
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
        for stream in streams:
            self._d2h_waits_for_compute(stream)
        self._d2h_waits_for_last_users(copies)
        pending = self.begin_offload(sources, copies, streams, nbytes)
        self._note_uses(copies, self.backend.d2h)
        self.backend.copy(self.backend.d2h, targets, parts, tickets[0].label)
        offloaded = self.backend.d2h.record_event()
        for copy in copies:
            copy.note_use(offloaded)
        if self.backend.is_capturing:
            self._of_graphs += copies  # their graph, launched again, copies to the same place
        if offloaded.query():
            self._pending_offloads.take_back(pending)
        else:
            self._keep_sources(tickets, sources, streams[0])
            pending.offloaded = offloaded
        self.counters.bytes_offloaded += nbytes
        return nbytes

    def _keep_sources(
        self, tickets: Sequence[Ticket], sources: Sequence[Tensor], stream: Stream
    ) -> None:
        """The copies are queued: until they were made, sources can be had back, and are watched."""
        for ticket, source in zip(tickets, sources, strict=True):
            assert ticket.copy is not None
            ticket.copy.keep_source(ticket.begin, source, stream)
            ticket.watch()

    def begin_offload(
        self,
        sources: list[Tensor],
        copies: Sequence[HostCopy],
        streams: Sequence[Stream],
        nbytes: int,
    ) -> PendingOffload:
        """Keep ``sources``, of which copies are about to be queued, until these were made.

        Args:
            sources: What is read.
            copies: What is told when it was.
            streams: The compute streams they may have been allocated on.
            nbytes: Of the sources.

        Returns:
            What is pending, whose event is to be set behind the copies. Then too much may be
            under way: see :meth:`keep_in_flight_bounded`.
        """
        for stream in streams:
            self.follow(stream)
        return self._pending_offloads.begin(sources, copies, nbytes)

    def reload(self, tickets: Sequence[Ticket]) -> int:
        """Queue the copies back to the device. Data is valid once :meth:`deliver` returned it.

        Returns:
            How many payloads are copied; those that share bytes count once.
        """
        self.check_process()  # before the lock, which a thread that is not here may hold
        with self.lock:
            self.poll()
            return self._copy_back(tickets)

    def _copy_back(self, tickets: Sequence[Ticket]) -> int:
        """Bring payloads from the buffers of their copies; see NOTE [ Brought once ]."""
        num, live = 0, self.backend.current_stream()
        for batch in self._distinct(tickets, live):
            self._queue_reload(batch, live)
            num += len(batch)
        return num

    def _distinct(self, tickets: Sequence[Ticket], live: Stream) -> Iterator[list[Ticket]]:
        """Batches of tickets with bytes of their own; what came by then is shared.

        There are two batches where tickets of the same batch have the same bytes: all but the first
        of these find their bytes behind the first batch, if those are still as they came.
        """
        left = list(tickets)
        while left := [ticket for ticket in left if not self._pending_reloads.share(ticket, live)]:
            batch = list({ticket.where: ticket for ticket in reversed(left)}.values())[::-1]
            yield batch
            left = [ticket for ticket in left if ticket.device_tensor is None]

    def _queue_reload(self, tickets: Sequence[Ticket], stream: Stream) -> None:
        """Copy from the buffers of their copies into new memory on the device."""
        device = self.backend.device
        copies: list[HostCopy] = []
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        device_copies: list[DeviceCopy] = []
        for ticket in tickets:
            copy, source = ticket.copy, ticket.host_bytes
            assert copy is not None and source is not None, "reload before offload"
            copies.append(copy)
            target = torch.empty_like(source, device=device)
            device_copies.append(self._begin_reload(ticket, target, stream))
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
        for copy in set(copies):
            assert copy.buffer is not None, "not in host memory"
            copy.buffer.last_use = reloaded
        for device_copy in device_copies:
            device_copy.reloaded = reloaded
        if self.backend.is_capturing:
            self._of_graphs += copies

    def _begin_reload(self, ticket: Ticket, target: Tensor, stream: Stream) -> DeviceCopy:
        """A copy into ``target`` is about to be queued; its event is to be set behind it."""
        self.counters.bytes_reloaded += ticket.nbytes
        return self._pending_reloads.begin(ticket, target, stream)

    def prefetch(self, tickets: Sequence[Ticket]) -> None:
        """A reload ahead of its use."""
        with self.lock:
            self.counters.prefetched_reloads += self.reload(tickets)

    def deliver(self, ticket: Ticket) -> Tensor:
        """The payload on the device, ready for the live compute stream.

        Reloads it now if nobody did before, or if it was reloaded for another stream, whose
        memory this one must not outlive. While the copy to the host is still to be made, its
        source is there, and is taken back as it is. See NOTE [ One lock ].

        Raises:
            SavedTensorModifiedError: It was changed in place before it was copied.
            ForkedError: It was offloaded before this process was forked.
        """
        self.check_process()
        live = self.backend.current_stream()
        with self.lock:
            found = self._find(ticket, live)
        if isinstance(found, Tensor):
            return found
        if not found.is_there and found.reloaded is not None:
            self._wait_once(live, found.reloaded)
        with self.lock:
            return self._give_out(ticket, found)

    def _find(self, ticket: Ticket, live: Stream) -> Tensor | DeviceCopy:
        """The payload, if it never left; or where it lands, which has to be waited for."""
        copy, reload = ticket.copy, ticket.pending_reload
        if copy is not None and (copy.watched is not None or copy.modified):
            self._check_unmodified(ticket, copy)
        if reload is not None and not self._is_good(reload, live):
            self._pending_reloads.give_up(reload, self.backend.h2d)
        if ticket.num_waiting <= 0:  # another backward through the same graph
            ticket.num_waiting = ticket.num_members
        if ticket.device_tensor is None:
            lent = ticket.in_flight_source
            if lent is not None and copy is not None and copy.stream == live:
                return self._take_back(ticket, lent)
            is_expected = ticket.pending_reload is not None
            num = self._reload_now(ticket)
            self.counters.on_demand_reloads += 0 if is_expected else num
        assert ticket.pending_reload is not None and ticket.pending_reload.device_copy is not None
        return ticket.pending_reload.device_copy

    def _reload_now(self, ticket: Ticket) -> int:
        """Queue the copy that brings the payload of a ticket, which is not on the device."""
        return self.reload([ticket])

    def _is_good(self, reload: PendingReload, live: Stream) -> bool:
        """Whether it belongs to the live stream, its copy was not interrupted, and nobody to whom
        it was given, in place of this ticket, has changed it.
        """
        device_copy = reload.device_copy
        if device_copy is None:
            return True  # a disk is read, which is of no stream yet
        is_known = device_copy.is_there or device_copy.reloaded is not None
        return (
            is_known
            and device_copy.stream == live
            and (reload.is_used or device_copy.is_as_it_came)
        )

    def _give_out(self, ticket: Ticket, device_copy: DeviceCopy) -> Tensor:
        """Compute has waited for the copy: one use of the payload."""
        device_copy.is_there = True
        reload = ticket.pending_reload
        if not device_copy.is_as_it_came:
            raise self._used_up(ticket, device_copy)
        device_copy.version = device_copy.tensor._version
        ticket.num_waiting -= 1
        if reload is not None and reload.device_copy is device_copy:
            reload.is_used = True
            if ticket.num_waiting <= 0:
                self._pass_on(ticket, device_copy.stream)
                self._pending_reloads.give_up(reload, self.backend.h2d)
        return device_copy.shaped_for(ticket)

    def _pass_on(self, ticket: Ticket, stream: Stream) -> None:
        """Before a ticket gives memory up: who has the same bytes and comes soon, takes it."""
        assert ticket.copy is not None, "reload before offload"
        same = ticket.copy.tickets[ticket.begin]
        for ref in reversed(same) if len(same) > 1 else ():  # saved later, so used earlier
            other = ref()
            if other is None or other is ticket or other.num_waiting <= 0 or other.is_coming:
                continue
            if self.comes_soon(other):
                self._pending_reloads.share(other, stream)
                return

    def _give_up(self, tickets: Sequence[Ticket]) -> None:
        """What came, or was to come, is not good."""
        with self.lock:
            for ticket in tickets:
                if ticket.pending_reload is not None:
                    self._pending_reloads.give_up(ticket.pending_reload, self.backend.h2d)

    def _take_back(self, ticket: Ticket, source: Tensor) -> Tensor:
        self.counters.taken_back += 1
        ticket.num_waiting -= 1
        shape = ticket.host_bytes
        assert shape is not None
        if source.shape == shape.shape and source.dtype == shape.dtype:
            return source
        return flat_bytes(source).view(shape.dtype).view(shape.shape)

    def _used_up(self, ticket: Ticket, device_copy: DeviceCopy) -> SavedTensorModifiedError:
        """Of several users of a payload, one in backward has changed it in place."""
        return SavedTensorModifiedError(
            f"one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of group '{ticket.label}' with payload shape "
            f"{tuple(device_copy.tensor.shape)}, saved several times, was changed by a backward "
            "that used it before; use an out-of-place operation there"
        )

    def _check_unmodified(self, ticket: Ticket, copy: HostCopy) -> None:
        copy.check_unmodified(ticket.begin)
        if ticket.begin in copy.modified and ticket.host_bytes is not None:
            raise SavedTensorModifiedError(
                f"a tensor of group '{ticket.label}' with payload shape "
                f"{tuple(ticket.host_bytes.shape)} was modified by an inplace operation after "
                "autograd saved it and before its bytes were copied; use an out-of-place operation "
                "there, or mark the tensor with mark_not_offloadable and see the error autograd "
                "raises for it"
            )

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
        """Inside, compute reads what these tickets take, wherever that was computed."""
        live, *sides = self.compute_streams(tickets)
        for side in sides:
            live.wait_event(side.record_event())
        yield
        for side in sides:
            side.wait_event(live.record_event())

    def after_copies(self, action: Callable[[], None]) -> None:
        """Run ``action`` when the sources of the copies queued so far have been let go."""
        with self.lock:
            self.poll()
            if self._pending_offloads:
                self._pending_offloads.last.then.append(action)
                return
        action()

    def poll(self) -> None:
        """Let go of what finished copies kept alive. Never blocks."""
        with self.lock:
            while self._pending_offloads.is_first_over(self.backend.d2h):
                self._finish(self._pending_offloads.first)
            self._pending_reloads.poll(self.backend.h2d)

    def join(self) -> None:
        """Make the live compute stream wait for all copies queued so far.

        Each copy stream becomes part of the capture it is in, if there is one, and rejoins it.
        """
        live = self.backend.current_stream()
        for side in (self.backend.d2h, self.backend.h2d):
            side.wait_event(live.record_event())
            live.wait_event(side.record_event())
        self.backend.joined()

    def compact(self) -> None:
        """Between steps: make host memory as tight as what the steps needed; waits for copies.

        Not to be called with the lock held. Does nothing inside a capture, where nobody can wait.
        """
        self._tidy(self._compact)

    def _tidy(self, act: Callable[[], None]) -> None:
        if self.backend.is_capturing:
            return
        try:
            when_finished(self.lock, act)
        except OffloadError:
            raise
        except Exception as failure:  # who needs what a copy failed to bring hears of it
            logger.debug("host memory stays as it is, for a copy failed: %s", failure)

    def _compact(self) -> None:
        self.poll()
        self._pending_reloads.count()
        for tier in self.host_tiers:
            tier.compact()

    @property
    def host_tiers(self) -> tuple[HostTier, ...]:
        """All host memory it uses."""
        return (self.host,)

    def disk_statistics(self) -> DiskStatistics:
        """All zero: without a disk tier there is nothing."""
        return DiskStatistics()

    def release_idle(self) -> None:
        """Give host memory back to the system that no saved tensor needs; waits for copies.

        Not to be called with the lock held. Does nothing inside a capture, where nobody can wait.
        """
        self._tidy(self._release_idle)

    def _release_idle(self) -> None:
        self.poll()
        for tier in self.host_tiers:
            tier.release_idle()

    def retire(self) -> None:
        """Another engine takes over: keep only what saved tensors that still live need."""
        self.release_idle()

    def __del__(self) -> None:
        """Memory goes with it that copies may still use which nobody waits for.

        It waits for its own copies alone: what another engine is about to queue on the same stream
        may be further up on this very thread, where garbage was collected in the middle of that.
        """
        with suppress(Exception):  # a copy that failed is over; or the process ends, and its driver
            if not self.backend.is_capturing:
                for event in (*self._pending_offloads.events(), *self._pending_reloads.events()):
                    event.synchronize()

    def close(self) -> None:
        """Finish all copies, then drop the host memory."""
        self.backend.synchronize()
        self.poll()
        for tier in self.host_tiers:
            tier.close()

    def _d2h_waits_for_compute(self, stream: Stream) -> None:
        self.backend.d2h.wait_event(stream.record_event())

    def _h2d_waits_for_compute(self, stream: Stream) -> None:
        self.backend.h2d.wait_event(stream.record_event())

    def _h2d_waits_for_offloaded(self, copies: Sequence[HostCopy]) -> None:
        seen: Event | None = None
        for copy in copies:
            if copy.offloaded is not None and copy.offloaded is not seen:
                seen = copy.offloaded
                self.backend.h2d.wait_event(seen)

    @staticmethod
    def _note_uses(copies: Sequence[HostCopy], stream: Stream) -> None:
        """Copies on ``stream``, which waits for the earlier uses, are about to use the buffers."""
        queued = Queued(stream)
        for copy in copies:
            assert copy.buffer is not None, "not in host memory"
            copy.buffer.last_use = queued

    def _d2h_waits_for_last_users(self, copies: Sequence[HostCopy]) -> None:
        """A copy that still reads a buffer is done before another one writes it.

        Of a host tier on one compute stream, this is so without a wait: nobody has the buffer, so
        compute has waited for what was read from it, or nobody will use that; and d2h waits for
        compute. The wait is for a forward on a stream of its own, beside that backward; and for
        staging buffers, free as soon as the copy is queued that takes what was read ahead.
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

    def keep_in_flight_bounded(self, last_bytes: int) -> None:
        """Make compute wait for copies to the host until no more is under way than may be.

        Not for those queued last: their sources were there while they were computed, so it would
        take time and lower no peak.

        Not to be called with the lock held: it blocks where the device is the host.

        Args:
            last_bytes: Of what was queued last.
        """
        while (pending := self._first_to_wait_for(last_bytes)) is not None:
            assert pending.offloaded is not None
            for stream in (self.backend.current_stream(), *self._compute_streams):
                stream.wait_event(pending.offloaded)
            if not self._knows_all_streams:  # memory may go back to a stream that did not wait
                pending.offloaded.synchronize()
            with self.lock:
                self._finish(pending)
        self._pending_reloads.keep_few_abandoned()
        self.poll()

    def _first_to_wait_for(self, last_bytes: int) -> PendingOffload | None:
        cap = self._max_in_flight_bytes
        with self.lock:
            self.poll()
            if self._pending_offloads.nbytes <= (max(cap, last_bytes) if cap else 0):
                return None
            return self._pending_offloads.first if self._pending_offloads else None

    def _finish(self, pending: PendingOffload) -> None:
        pending.finish()
        self._pending_offloads.end(pending)

    def _wait_once(self, live: Stream, reloaded: Event) -> None:
        """Make the live stream wait; many payloads that came together share an event."""
        waited = self._waited
        if waited is None or waited[0] is not reloaded or waited[1] != live:
            self._compute_waits_for(live, reloaded)
            self._waited = reloaded, live

    def _compute_waits_for(self, stream: Stream, event: Event) -> None:
        start = time.perf_counter()
        stream.wait_event(event)
        self.counters.consumer_wait_ms += (time.perf_counter() - start) * 1e3


def cut_like(pieces: Sequence[Tensor], tensor: Tensor) -> Sequence[Tensor]:
    """The bytes of a contiguous tensor, in parts as long as ``pieces``; no copy."""
    return flat_bytes(tensor).split([piece.numel() for piece in pieces])


def record(stream: Stream) -> Event:
    """A new event on ``stream``."""
    return stream.record_event()


def known(event: Event) -> Event:
    """The backend's own event, also where an interrupt left none."""
    return event.event if isinstance(event, Queued) else event


def wait(stream: Stream, event: Event | None) -> None:
    """Make ``stream`` wait for ``event``, if there is one."""
    if event is not None:
        stream.wait_event(event)
