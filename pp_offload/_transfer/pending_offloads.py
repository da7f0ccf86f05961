"""Copies to the host under way, the device memory they read, and how much of it there may be.

    pending = in_flight.begin(sources, copies, streams, nbytes)  # before the copies are queued
    pending.offloaded = d2h.record_event()                       # behind them
    while offloads.is_first_over(d2h): ...                       # offloads.finish(offloads.first)
    in_flight.keep_bounded(nbytes, poll)                         # where nobody holds the lock

NOTE [ Keep-alive ]
    What a copy reads stays referenced until its event has passed: let go without a wait when the
    event says so, or after a stream-ordered wait when too many bytes are in flight. The memory
    returns to the stream it was allocated on, which need not be the one that saved it, so every
    compute stream on which a group was started or offloaded waits. The same holds for a target
    nobody used, on the stream it was allocated on. ``record_stream`` is not used: it makes memory
    non-deterministic.

    While it is referenced, whoever wants the bytes back takes the source, not the copy.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pp_offload._transfer.ticket import HostCopy
from pp_offload.backends import Backend, Event, Stream

IN_FLIGHT_BYTES = 2**29
"""On their way to the host, where nobody says how much may be."""

MAX_STREAMS = 32
"""Compute streams that are remembered; PyTorch hands out so many, again and again."""


@dataclass(slots=True, eq=False)
class PendingOffload:
    """A batch that leaves the device, with the sources that must outlive the copy."""

    payloads: list[Tensor]
    """What is read."""

    copies: list[weakref.ref[HostCopy]]
    """What is told when it was."""

    nbytes: int
    """Of the payloads."""

    total: int
    """Bytes of this one and of those before it that were under way with it."""

    offloaded: Event | None = None
    """Behind the copies. None until they are queued: see NOTE [ Torn bookkeeping ]."""

    then: list[Callable[[], None]] = field(default_factory=list)
    """To be done when the payloads were let go."""

    def finish(self) -> None:
        """The copies were made: let go of what they read. A second time is fine."""
        for ref in self.copies:
            copy = ref()
            if copy is not None:
                copy.finish()
        self.payloads.clear()
        while self.then:
            self.then.pop(0)()


class Queued:
    """The end of all that a stream was given, for as long as no event behind it is known.

    It is known before anything is queued; who asks first, records. See NOTE [ Torn bookkeeping ].
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


class PendingOffloads:
    """Offloads in the order they began, which is that in which they end."""

    def __init__(self) -> None:
        self._queue: deque[PendingOffload] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def events(self) -> list[Event]:
        """Behind the copies that are under way, as far as they are known."""
        return [one.offloaded for one in self._queue if one.offloaded is not None]

    @property
    def nbytes(self) -> int:
        """Bytes under way, from the queue itself, so that an interrupt cannot leave it wrong."""
        queue = self._queue
        return queue[-1].total - queue[0].total + queue[0].nbytes if queue else 0

    @property
    def first(self) -> PendingOffload:
        """The one that ends next. There must be one."""
        return self._queue[0]

    @property
    def last(self) -> PendingOffload:
        """The one that began last. There must be one."""
        return self._queue[-1]

    def begin(
        self, payloads: list[Tensor], copies: Sequence[HostCopy], nbytes: int
    ) -> PendingOffload:
        """Keep ``payloads``, which are about to be copied."""
        total = nbytes + (self._queue[-1].total if self._queue else 0)
        pending = PendingOffload(payloads, [weakref.ref(copy) for copy in copies], nbytes, total)
        self._queue.append(pending)
        return pending

    def is_first_over(self, d2h: Stream) -> bool:
        """Whether there is one, and its copies were made."""
        if not self._queue:
            return False
        pending = self._queue[0]
        if pending.offloaded is None:  # NOTE [ Torn bookkeeping ]
            pending.offloaded = d2h.record_event()
        return pending.offloaded.query()

    def finish(self, pending: PendingOffload) -> None:
        """The first one has ended. A second time is fine."""
        pending.finish()
        if self._queue and self._queue[0] is pending:
            self._queue.popleft()

    def take_back(self, pending: PendingOffload) -> None:
        """The one that began last ended at once."""
        if self._queue and self._queue[-1] is pending:
            self._queue.pop()


class InFlight:
    """Keeps what is on its way to the host below a cap. See NOTE [ Keep-alive ].

    Args:
        backend: Whose compute streams wait.
        lock: See NOTE [ One lock ].
        max_bytes: Device bytes that may wait for their copy to the host, beside those that were
            sent last; None for twice the largest group, at least :data:`IN_FLIGHT_BYTES`. 0 means
            that compute waits for each copy.

    Attributes:
        offloads: What is on its way.
    """

    def __init__(
        self, backend: Backend, lock: AbstractContextManager[Any], max_bytes: int | None
    ) -> None:
        self.offloads = PendingOffloads()
        self.max_bytes = IN_FLIGHT_BYTES if max_bytes is None else max_bytes
        self._backend = backend
        self._lock = lock
        self._follows_groups = max_bytes is None
        self._compute_streams: tuple[Stream, ...] = (backend.current_stream(),)
        self._knows_all_streams = True

    def follow(self, stream: Stream) -> None:
        """What is offloaded may have been allocated on this compute stream."""
        streams = self._compute_streams
        if stream is streams[-1] or stream in streams or self._backend.is_capturing:
            return
        if len(streams) >= MAX_STREAMS:
            self._knows_all_streams = False
        self._compute_streams = (*streams, stream)[-MAX_STREAMS:]

    def begin(
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
            under way: see :meth:`keep_bounded`.
        """
        for stream in streams:
            self.follow(stream)
        return self.offloads.begin(sources, copies, nbytes)

    def expect(self, group_bytes: int) -> None:
        """A group of so many bytes was sent, and others may be as large."""
        if self._follows_groups:
            self.max_bytes = max(self.max_bytes, 2 * group_bytes)

    def keep_bounded(self, last_bytes: int, poll: Callable[[], None]) -> None:
        """Make compute wait for copies to the host until no more is under way than may be.

        Not for those queued last: their sources were there while they were computed, so it would
        take time and lower no peak.

        Not to be called with the lock held: it blocks where the device is the host.

        Args:
            last_bytes: Of what was queued last.
            poll: Looks what has ended.
        """
        while (pending := self._first_to_wait_for(last_bytes, poll)) is not None:
            assert pending.offloaded is not None
            for stream in (self._backend.current_stream(), *self._compute_streams):
                stream.wait_event(pending.offloaded)
            if not self._knows_all_streams:  # memory may go back to a stream that did not wait
                pending.offloaded.synchronize()
            with self._lock:
                self.offloads.finish(pending)

    def _first_to_wait_for(
        self, last_bytes: int, poll: Callable[[], None]
    ) -> PendingOffload | None:
        cap = self.max_bytes
        with self._lock:
            poll()
            if self.offloads.nbytes <= (max(cap, last_bytes) if cap else 0):
                return None
            return self.offloads.first if self.offloads else None
