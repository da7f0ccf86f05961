"""The disk tier: batches in a file, which threads write and read.

    behind a device   d2h copies to host memory, a thread writes that behind ``offloaded``; then the
                      file alone has the bytes. Back: a thread reads to host memory, h2d copies.
    where it is the   a thread writes the sources, which stay until then, and reads into the memory
    host              that autograd gets: no copy is made in memory, so what left really left it.

What is asked for before it is written comes from where it still is.

NOTE [ When the disk fails ]
    What could not be written stays where it is, in host memory or on the device, and later groups
    stay on the device until the next step tries again. What cannot be read raises when it is asked
    for; asked for again, it is read again.

NOTE [ On the way ]
    Host memory that bytes pass through is bounded like device memory in flight. Who finds it full
    waits for the furthest work of a thread, without the lock. Without such work, a batch that
    leaves stays on the device, and one that must come back goes over the budget: it has no other
    way. A thread's work may outlive the batch, and a read must not write where others copy to by
    then. So the read keeps its memory until it has ended; a write may read what it likes by then.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from pp_offload._core.batch import Back, Reload
from pp_offload._core.tensors import flat_bytes
from pp_offload._core.tiers import Busy, HostTier, Place, Spec, Tier
from pp_offload._memory.host_pool import HostBytes
from pp_offload._policy.bound import Bound
from pp_offload.backends import Backend, Event
from pp_offload.errors import NotWhileCapturingError, OffloadError

logger = logging.getLogger(__name__)


class Written(Protocol):
    """Bytes on disk, or on their way there, for as long as anybody refers to this."""

    @property
    def event(self) -> Event:
        """The end of the write, well or not."""
        ...

    @property
    def failure(self) -> OffloadError | None:
        """Once it has ended: why the bytes are not on disk."""
        ...


class Disk(Protocol):
    """What :class:`~pp_offload._memory.disk_file.DiskFile` is, and a tier of your own may be."""

    written_bytes: int
    read_bytes: int
    peak_bytes: int

    @property
    def in_use_bytes(self) -> int:
        """Of living batches."""
        ...

    def write(self, payloads: Sequence[Tensor], after: Sequence[Event] = ()) -> Written:
        """Begin to write flat ``uint8`` host tensors, when the events have ended."""
        ...

    def read_into(
        self, write: Any, payloads: Sequence[Tensor], after: Sequence[Event] = ()
    ) -> Event:
        """Begin to read what was written, which may go meanwhile.

        To wait for the event raises a DiskTierError if the read failed.
        """
        ...

    def close(self) -> None:
        """Nobody needs it any more."""
        ...


class Together(NamedTuple):
    """The end of all of some work."""

    events: Sequence[Event]

    def query(self) -> bool:
        """Whether all has ended."""
        return all([event.query() for event in self.events])

    def synchronize(self) -> None:
        """Block until all has ended; raises the first failure."""
        for event in self.events:
            event.synchronize()


class Passage:
    """Host memory that bytes pass through, free when nobody refers to this."""

    __slots__ = ("__weakref__", "host")

    host: HostBytes


class Read(NamedTuple):
    """What a thread reads, until it is sent on to the device."""

    back: Back
    indices: Sequence[int]
    reload: Reload
    event: Event
    allocated: Event
    """Behind former uses of the device memory."""

    passage: Passage | None
    """None where it is read into the device memory itself."""


class DiskPlace:
    """Room for a batch.

    Args:
        tier: Whose.
        sizes: Bytes of each payload.
        specs: What each looks like.
        passage: Host memory on the way; None where the device is the host.

    Attributes:
        writes: Of all payloads together, or of each where the device is the host; none once the
            disk has refused them.
        has_failed: Whether it has.
    """

    __slots__ = (
        "__weakref__",
        "is_direct",
        "has_failed",
        "passage",
        "sizes",
        "specs",
        "tier",
        "writes",
    )

    def __init__(
        self,
        tier: DiskTier,
        sizes: Sequence[int],
        specs: Sequence[Spec],
        passage: Passage | None,
    ) -> None:
        self.tier, self.sizes, self.specs, self.passage = tier, sizes, specs, passage
        self.is_direct = passage is None
        self.writes: Sequence[Written] = ()
        self.has_failed = False

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The payloads in host memory, while they are there."""
        return () if self.passage is None else self.passage.host.tensors

    @property
    def waits_for(self) -> Sequence[Event]:
        """Former uses of that memory."""
        return () if self.passage is None else self.passage.host.waits_for

    @property
    def last_use(self) -> Event | None:
        """Of that memory."""
        return None if self.passage is None else self.passage.host.last_use

    @last_use.setter
    def last_use(self, event: Event) -> None:
        if self.passage is not None:
            self.passage.host.last_use = event

    @property
    def is_refused(self) -> bool:
        """Once the writes have ended: whether the bytes are in the sources alone."""
        return self.is_direct and (self.has_failed or self.failure() is not None)

    def keep(self) -> None:
        """See :meth:`Place.keep`. No capture gets this far: it neither writes here nor reads."""

    def write(self, sources: Sequence[Tensor], arrived: Event) -> Event:
        """Begin to write; returns the event with which the sources may go.

        Args:
            sources: On the device.
            arrived: Behind their copies to host memory.
        """
        disk = self.tier.disk
        self.tier.writing.append(weakref.ref(self))
        if self.passage is not None:
            self.writes = [disk.write(self.passage.host.views, after=[arrived])]
            return arrived
        self.writes = [disk.write([flat_bytes(source)]) for source in sources]
        return self.written()  # which keeps no bytes on disk

    def written(self) -> Event:
        """The end of the writes."""
        return Together([write.event for write in self.writes])

    def failure(self) -> OffloadError | None:
        """Once they have ended: why the bytes are not on disk; None if they are."""
        return next((write.failure for write in self.writes if write.failure is not None), None)

    def end_writing(self) -> None:
        """The writes have ended: the bytes are in one place alone."""
        if self.failure() is None:
            self.passage = None
        else:
            self.writes, self.has_failed = (), True

    def passage_back(self, *, force: bool) -> Passage | None:
        """Host memory to read to; None where the device is the host."""
        return None if self.is_direct else self.tier.passage(self.sizes, self.specs, force=force)

    def read(
        self, passage: Passage | None, indices: Sequence[int], into: Sequence[Tensor]
    ) -> Event:
        """Begin to read: all to the passage, or without one these payloads into their memory."""
        disk = self.tier.disk
        if passage is None:
            pairs = zip(indices, into, strict=True)
            return Together([disk.read_into(self.writes[i], [flat_bytes(t)]) for i, t in pairs])
        host = passage.host
        event: Event = disk.read_into(self.writes[0], host.views, after=host.waits_for)
        return event


class DiskTier(Tier):
    """Room on a disk.

    Args:
        backend: The device.
        disk: Writes and reads.
        host: Where batches stay that have room there; None if all go to disk.
        staging: Host memory that bytes pass through; None where the device is the host.
        bound: On that memory.
        name: In messages.

    Attributes:
        writing: Places that threads write, in order.
        reads: What threads read for the mover, in order.
    """

    def __init__(
        self,
        backend: Backend,
        disk: Disk,
        host: HostTier | None,
        staging: HostTier | None,
        bound: Bound,
        name: str = "disk",
    ) -> None:
        self.name, self.disk = name, disk
        self.pools = [tier.pool for tier in (host, staging) if tier is not None]
        self.writing: deque[weakref.ref[DiskPlace]] = deque()
        self.reads: deque[Read] = deque()
        self._backend, self._host, self._staging, self._bound = backend, host, staging, bound
        self._failure: OffloadError | None = None
        self._has_warned = False

    def take(self, owner: object, sizes: Sequence[int], specs: Sequence[Spec]) -> Place:
        """See :meth:`Tier.take`."""
        if self._host is not None:
            with suppress(MemoryError):
                return self._host.take(owner, sizes, specs)
        if self._backend.is_capturing:
            raise NotWhileCapturingError(
                f"writing to {self.name} cannot be part of a captured graph"
            )
        self.poll()
        if self._failure is not None:
            raise MemoryError(str(self._failure))
        self._bound.expect(sum(sizes))
        passage = None if self._staging is None else self.passage(sizes, specs)
        return DiskPlace(self, sizes, specs, passage)

    def passage(
        self, sizes: Sequence[int], specs: Sequence[Spec], *, force: bool = False
    ) -> Passage:
        """Host memory on the way; see NOTE [ On the way ].

        Raises:
            Busy: A thread's work makes room.
            MemoryError: It would be over the budget.
        """
        assert self._staging is not None
        self.poll()
        passage, furthest = Passage(), self.furthest()
        is_full = self._staging.pool.in_use_bytes + sum(sizes) > self._bound.nbytes
        if furthest is not None and is_full:
            raise Busy(furthest)
        try:
            passage.host = self._staging.take(passage, sizes, specs, force=force)
        except MemoryError:
            if furthest is None:
                raise
            raise Busy(furthest) from None
        return passage

    def furthest(self) -> Event | None:
        """See :meth:`Tier.furthest`."""
        for ref in self.writing:
            if (place := ref()) is not None:
                return place.written()
        return self.reads[0].event if self.reads else None

    def poll(self) -> None:
        """Let go of host memory whose bytes are on disk; see NOTE [ When the disk fails ]."""
        while self.writing:
            place = self.writing[0]()
            if place is not None:
                if not place.written().query():
                    return
                self._note(place.failure())
                place.end_writing()
            self.writing.popleft()

    def _note(self, failure: OffloadError | None) -> None:
        if failure is None:
            return
        self._failure = failure
        logger.log(
            logging.DEBUG if self._has_warned else logging.WARNING,
            "offloaded activations could not be written and stay in memory, as will what follows "
            "in this step; from now on without a warning: %s",
            str(failure),
        )
        self._has_warned = True

    def retry(self) -> None:
        """See :meth:`Tier.retry`."""
        self._failure = None

    def check_capture(self) -> None:
        """Raise while a graph is captured: when it runs again, the bytes are elsewhere."""
        if self._backend.is_capturing:
            raise NotWhileCapturingError(
                f"reading from {self.name} cannot be part of a captured graph; keep what it needs "
                'in host memory, with tiers=("host",)'
            )
