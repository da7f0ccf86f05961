"""Copies to the host under way, and the device memory they read.

pending = offloads.begin(sources, blocks, nbytes)  # before the copies are queued
pending.offloaded = d2h.record_event()             # behind them
while offloads.is_first_over(d2h):                 # now and then
    offloads.finish(offloads.first)
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pp_offload._transfer.block import Block
from pp_offload.backends import Event, Stream


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

    def finish(self) -> None:
        """The copies were made: let go of what they read. A second time is fine."""
        for ref in self.blocks:
            block = ref()
            if block is not None:
                block.finish()
        self.payloads.clear()
        while self.then:
            self.then.pop(0)()


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


class PendingOffloads:
    """Offloads in the order they began, in which they also end."""

    def __init__(self) -> None:
        self._queue: deque[PendingOffload] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def events(self) -> list[Event]:
        """Events behind the copies under way, but for those that an interrupt left without."""
        return [one.offloaded for one in self._queue if one.offloaded is not None]

    @property
    def nbytes(self) -> int:
        """Bytes under way, summed from the queue, so that an interrupt cannot leave it wrong."""
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

    def begin(self, payloads: list[Tensor], blocks: Sequence[Block], nbytes: int) -> PendingOffload:
        """Keep ``payloads``, which are about to be copied."""
        total = nbytes + (self._queue[-1].total if self._queue else 0)
        pending = PendingOffload(payloads, [weakref.ref(block) for block in blocks], nbytes, total)
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
        """Finish and remove the first one, which has ended. A second time is fine."""
        pending.finish()
        if self._queue and self._queue[0] is pending:
            self._queue.popleft()

    def drop_last(self, pending: PendingOffload) -> None:
        """Remove the one that began last, which ended at once."""
        if self._queue and self._queue[-1] is pending:
            self._queue.pop()
