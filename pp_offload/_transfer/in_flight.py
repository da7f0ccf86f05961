"""How much device memory may wait for its copy to the host.

    pending = in_flight.begin(sources, copies, streams, nbytes)  # before the copies are queued
    pending.offloaded = d2h.record_event()                       # behind them
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

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from pp_offload._transfer.pending_offloads import PendingOffload, PendingOffloads
from pp_offload._transfer.ticket import HostCopy
from pp_offload.backends import Backend, Stream

IN_FLIGHT_BYTES = 2**29
"""On their way to the host, where nobody says how much may be."""

MAX_STREAMS = 32
"""Compute streams that are remembered; PyTorch hands out so many, again and again."""


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
