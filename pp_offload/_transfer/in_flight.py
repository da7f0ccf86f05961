"""How much device memory may wait for its copy to the host.

    pending = in_flight.begin(sources, blocks, streams, nbytes)  # before the copies are queued
    pending.offloaded = d2h.record_event()                       # behind them
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

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from pp_offload._transfer.block import Block
from pp_offload._transfer.pending_offloads import PendingOffload, PendingOffloads
from pp_offload.backends import Backend, Stream

IN_FLIGHT_BYTES = 2**29
"""How much may be in flight where no option says so."""

MAX_STREAMS = 32
"""Compute streams that are remembered; PyTorch has so many, and hands them out in turn."""


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
        """Remember a compute stream on which sources may have been allocated."""
        streams = self._compute_streams
        if stream is streams[-1] or stream in streams or self._backend.is_capturing:
            return
        if len(streams) >= MAX_STREAMS:
            self._knows_all_streams = False
        self._compute_streams = (*streams, stream)[-MAX_STREAMS:]

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
        return self.offloads.begin(sources, blocks, nbytes)

    def expect(self, group_bytes: int) -> None:
        """Unless an option sets the cap, keep it at twice a group of so many bytes at least."""
        if self._follows_groups:
            self.max_bytes = max(self.max_bytes, 2 * group_bytes)

    def keep_bounded(self, last_bytes: int, poll: Callable[[], None]) -> None:
        """Make compute wait for copies to the host until no more is in flight than may be.

        Not for the last offload: its sources had to be there until now, so waiting for it would
        take time and lower no peak.

        Not to be called with the lock held: it blocks where the device is the host.

        Args:
            last_bytes: Of the last offload.
            poll: Lets go of what has ended.
        """
        if not self.offloads.nbytes:
            return
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
