"""Copies to the host under way, and how much device memory they may keep.

    pending = in_flight.begin(sources, blocks, streams, nbytes)  # before the copies are queued
    pending.offloaded = d2h.record_event()                       # behind them
    in_flight.poll()                                             # now and then
    in_flight.keep_bounded(nbytes, poll)                         # where nobody holds the lock

NOTE [ Keep-alive ]
    The sources of a copy stay referenced until its event has passed. They are let go without a wait
    once it has, or after a stream-ordered wait when too many bytes are in flight. Their memory
    returns to the stream it was allocated on, which need not be the one that saved them, so every
    compute stream on which a group was started or offloaded waits. The target of a reload that
    nobody used is kept in the same way; the stream it was allocated on waits. ``record_stream`` is
    not used: with it, when memory is free again differs from run to run.

    While a source is referenced, whoever wants the bytes back takes it, not the copy.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from pp_offload._policy.bound import Bound
from pp_offload._policy.bounds import IN_FLIGHT_BYTES
from pp_offload._transfer.block import Block
from pp_offload._transfer.stopwatch import Stopwatch
from pp_offload.backends import Backend, Event, Stream, bare, known_to


class ComputeStreams:
    """Compute streams of a device on which sources may have been allocated.

    Of all its engines: what one has seen a forward compute, another may copy. Their backends may
    be of several kinds, so the streams are PyTorch's own.

    Attributes:
        known: In the order in which they were first seen.
    """

    def __init__(self) -> None:
        self.known: list[Any] = []


_OF_BACKENDS: WeakKeyDictionary[Backend, ComputeStreams] = WeakKeyDictionary()
_OF_DEVICES: WeakValueDictionary[torch.device, ComputeStreams] = WeakValueDictionary()


def compute_streams(backend: Backend) -> ComputeStreams:
    """Those of the backend's device, which may have several backends.

    Of PyTorch's accelerators, for ``cpu`` and ``meta`` have no streams: those of a backend whose
    device tensors are there are its own.
    """
    if backend.device.type in ("cpu", "meta"):
        return _OF_BACKENDS.setdefault(backend, ComputeStreams())
    return _OF_DEVICES.setdefault(backend.device, ComputeStreams())


@dataclass(slots=True, eq=False)
class PendingOffload:
    """A batch that leaves the device, with the sources that must outlive the copy."""

    payloads: list[Tensor]
    """What the copies read."""

    blocks: list[weakref.ref[Block]]
    """Told when the payloads were read."""

    nbytes: int
    """Bytes of the payloads."""

    total: int
    """Bytes of this one and of all before it, counted since the queue was empty."""

    offloaded: Event | None = None
    """Behind the copies. None until they are queued: see NOTE [ Torn bookkeeping ]."""

    then: list[Callable[[], None]] = field(default_factory=list)
    """Called when the payloads were let go."""

    def event(self, d2h: Stream) -> Event:
        """Behind the copies. See NOTE [ Torn bookkeeping ]."""
        if self.offloaded is None:
            self.offloaded = d2h.record_event()
        return self.offloaded

    def finish(self) -> None:
        """The copies were made: let go of what they read. A second time is fine."""
        for ref in self.blocks:
            block = ref()
            if block is not None:
                block.finish()
        self.payloads.clear()
        while self.then:
            self.then.pop(0)()


class InFlight:
    """Offloads in the order they began, in which they also end. See NOTE [ Keep-alive ].

    Args:
        backend: Whose compute streams wait.
        lock: See NOTE [ One lock ].
        stopwatch: Times those waits where it runs.
        max_bytes: Device bytes that may wait for their copy to the host, beside those that were
            sent last, as for :class:`Bound`. 0 means that compute waits for each copy.

    Attributes:
        bound: On these bytes, as it is now.
        queue: What is on its way.
    """

    def __init__(
        self,
        backend: Backend,
        lock: AbstractContextManager[Any],
        stopwatch: Stopwatch,
        max_bytes: int | str,
    ) -> None:
        self.queue: deque[PendingOffload] = deque()
        self.bound = Bound(max_bytes, IN_FLIGHT_BYTES)
        self._backend = backend
        self._lock = lock
        self._stopwatch = stopwatch
        self._streams = compute_streams(backend)
        self.follow(backend.current_stream())

    @property
    def nbytes(self) -> int:
        """Bytes under way, summed from the queue, so that an interrupt cannot leave it wrong."""
        queue = self.queue
        return queue[-1].total - queue[0].total + queue[0].nbytes if queue else 0

    def events(self) -> list[Event]:
        """Events behind the copies under way, but for those that an interrupt left without."""
        return [one.offloaded for one in self.queue if one.offloaded is not None]

    def follow(self, stream: Stream) -> None:
        """Remember a compute stream on which sources may have been allocated."""
        known, one = self._streams.known, bare(stream)
        if known and (one is known[-1] or one in known or self._backend.is_capturing):
            return
        known.append(one)

    def begin(
        self,
        sources: list[Tensor],
        blocks: Sequence[Block],
        streams: Sequence[Stream],
        nbytes: int,
    ) -> PendingOffload:
        """Keep ``sources`` until their copies, which the caller queues next, have run.

        Args:
            sources: What the copies read.
            blocks: Told when the sources were read.
            streams: The compute streams that sources may have been allocated on.
            nbytes: Of the sources.

        Returns:
            The offload, whose event the caller sets behind the copies. Then too much may be in
            flight: see :meth:`keep_bounded`.
        """
        for stream in streams:
            self.follow(stream)
        total = nbytes + (self.queue[-1].total if self.queue else 0)
        pending = PendingOffload(sources, list(map(weakref.ref, blocks)), nbytes, total)
        self.queue.append(pending)
        return pending

    def poll(self) -> None:
        """Let go of what finished copies kept alive. Never blocks."""
        queue = self.queue
        while queue:
            first = queue[0]
            if not (first.offloaded or first.event(self._backend.d2h)).query():
                return
            self.finish(first)

    def finish(self, pending: PendingOffload) -> None:
        """Finish and remove the first one, which has ended. A second time is fine."""
        pending.finish()
        if self.queue and self.queue[0] is pending:
            self.queue.popleft()

    def drop_last(self, pending: PendingOffload) -> None:
        """Remove the one that began last, which ended at once."""
        if self.queue and self.queue[-1] is pending:
            self.queue.pop()

    def keep_bounded(self, last_bytes: int, poll: Callable[[], None]) -> None:
        """Make compute wait for copies to the host until no more is in flight than may be.

        Not for the last offload: its sources had to be there until now, so waiting for it would
        take time and lower no peak.

        Not to be called with the lock held: it blocks where the device is the host.

        Args:
            last_bytes: Of the last offload.
            poll: Lets go of what has ended.
        """
        while (pending := self._first_to_wait_for(last_bytes, poll)) is not None:
            self._wait_for(pending)

    def join(self, last: PendingOffload) -> None:
        """Make compute wait for the copies up to these, and let go of what they read.

        Not to be called with the lock held, as :meth:`keep_bounded`.

        Args:
            last: One that was at the end of :attr:`queue`; nothing happens if it has ended.
        """
        while (pending := self._first_up_to(last)) is not None:
            self._wait_for(pending)

    def _wait_for(self, pending: PendingOffload) -> None:
        event = pending.event(self._backend.d2h)
        others = [known_to(self._backend, one) for one in self._streams.known]
        for stream in (self._backend.current_stream(), *others):
            self._stopwatch.wait(stream, event)
        with self._lock:
            self.finish(pending)

    def _first_up_to(self, last: PendingOffload) -> PendingOffload | None:
        with self._lock:
            return self.queue[0] if last in self.queue else None

    def _first_to_wait_for(
        self, last_bytes: int, poll: Callable[[], None]
    ) -> PendingOffload | None:
        if not self.queue:
            return None
        cap = self.bound.nbytes
        with self._lock:
            poll()
            if self.nbytes <= (max(cap, last_bytes) if cap else 0):
                return None
            return self.queue[0] if self.queue else None
