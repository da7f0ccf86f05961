"""Tiers, which hold the bytes of batches: host memory, or a disk behind it.

    tier = make_tier(backend, OffloadConfig(tiers=("host", "disk")), backend.allocate_host)
    batch.place = tier.take(batch, sizes, specs)  # MemoryError: no room, nothing has changed
    tier.write(batch)                             # by a thread, if the batch has a ``passage``
    ...                                           # all is free when the batch is garbage

After the write, only the disk has the bytes. To come back, they are read to host memory by a
thread, then copied like any batch; once they are on the device that memory is free again. A reload
before the write has ended uses host memory.

NOTE [ When the disk fails ]
    Bytes that could not be written stay in host memory, and later groups stay on the device until
    the next step tries again. A failed read raises at each use, which tries to read again.

NOTE [ On the way ]
    Host memory that bytes pass through is bounded like device memory in flight. If it is full, the
    caller waits for the thread's work that frees some next, without the lock. Without such work, a
    batch that leaves stays on the device, and one that must come back exceeds the budget: it has no
    other way. A thread's work may outlive the batch, so a read keeps memory until it ends.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from pp_offload._common.processes import logger_of, warn_once
from pp_offload._core.batch import Batch, Spec
from pp_offload._core.in_flight import Bound
from pp_offload._memory.addresses import outside_inference_mode
from pp_offload._memory.budget import HostBudget
from pp_offload._memory.disk_file import DiskFile
from pp_offload._memory.host_pool import Allocate, HostBytes, HostPool, Owner
from pp_offload.backends import Backend, Event
from pp_offload.config import OffloadConfig
from pp_offload.errors import NotWhileCapturingError, TierError

logger = logger_of(__name__)

STAGING_SHARE = 8  # 1/8 of the host budget is reserved for bytes on the way to the disk
STAGING_BYTES = 2**29  # default bound on bytes that pass through host memory


class Busy(Exception):
    """Raised if there is no room until ``event`` has ended. Nothing changed: wait, then retry."""

    def __init__(self, event: Event) -> None:
        self.event = event


@dataclass(slots=True, eq=False)
class Read:
    """A read of a batch back to host memory, by a thread."""

    batch: weakref.ref[Batch]
    passage: Owner  # kept until the read has ended, which may outlive the batch
    # The end of the read. None if an exception came before it was noted; the passage then lives as
    # long as the engine, as a thread may write to it.
    event: Event | None = None


class HostTier:
    """Host memory under the budget of the process. The caller holds the mover's lock."""

    disk: Any = None  # store behind host memory
    reads: Any = ()  # by threads, in order
    failure: Exception | None = None  # why nothing goes to the disk until the next step clears it

    def __init__(self, pool: HostPool) -> None:
        self.pool, self.pools = pool, [pool]

    def take(
        self, owner: Any, sizes: Sequence[int], specs: Sequence[Spec], *, force: bool = False
    ) -> HostBytes:
        """Return host memory shaped like the payloads, free again when ``owner`` is garbage; if
        forced, over the budget. Raises a MemoryError, which names the budget, if there is no room.
        """
        place = self.pool.take(sizes, owner, force=force)
        if specs != place.specs:  # else shaped already, in the last step
            with outside_inference_mode():
                views = zip(place.views, specs, strict=True)
                place.tensors = [view.view(dtype).view(shape) for view, (shape, dtype) in views]
            place.specs = specs  # last, for an interrupt
        return place


class DiskTier(HostTier):
    """A disk, behind host memory that bytes pass through.

    Args:
        pool, bound: Host memory that bytes pass through, and the bound on them.
        disk: Store that writes and reads.
        host: Tier of batches that stay in host memory; None if all go to disk.
    """

    def __init__(
        self, pool: HostPool, bound: Bound, backend: Backend, disk: Any, host: HostTier | None
    ) -> None:
        super().__init__(pool)
        if host is not None:
            self.pools.insert(0, host.pool)
        self.disk = disk
        self.writing: deque[weakref.ref[Batch]] = deque()  # which threads write, in order
        self.reads: deque[Read] = deque()
        self._backend, self._bound, self._host = backend, bound, host

    def take(
        self, owner: Any, sizes: Sequence[int], specs: Sequence[Spec], *, force: bool = False
    ) -> HostBytes:
        """Return host memory as :class:`HostTier` does. If bytes only pass through it, its owner is
        ``owner.passage``, which is set then. Raises Busy if the work of a thread will make room,
        else a MemoryError if there is none, or the disk has failed.
        """
        if self._host is not None:
            with suppress(MemoryError):
                return self._host.take(owner, sizes, specs)
        self.check_capture("writing to")
        self.poll()
        if self.failure is not None:
            raise MemoryError(str(self.failure))
        self._bound.expect(sum(sizes))
        owner.passage = self.passage(sizes, specs, force=force)
        return owner.passage.host

    def write(self, batch: Batch) -> None:
        """Queue a write of a batch that passes through, behind ``batch.offloaded``."""
        batch.write = self.disk.write(batch.place.views, after=[batch.offloaded])
        self.writing.append(weakref.ref(batch))

    def read(self, batch: Batch, *, force: bool = False) -> Event | None:
        """Queue a read of bytes that only the disk has, unless one runs; :meth:`poll` notices its
        end. If forced, exceed the budget where no thread's work makes room. Returns the event to
        wait for: the read, or the work that makes room for it. None without room, unless forced.
        """
        self.check_capture("reading from")
        if batch.reading is not None:
            return batch.reading
        try:
            read = Read(weakref.ref(batch), self.passage(batch.sizes, batch.specs, force=force))
        except Busy as busy:
            return busy.event
        except MemoryError:
            if force:
                raise
            return None
        host = read.passage.host
        self.reads.append(read)  # first: an interrupt must not free what a thread writes to
        try:
            read.event = self.disk.read_into(batch.write, host.views, after=host.waits_for)
        except Exception:  # refused: no thread has begun
            self.reads.remove(read)
            raise
        batch.reading = read.event  # last: a read that poll() does not see would never end
        return batch.reading

    def passage(self, sizes: Sequence[int], specs: Sequence[Spec], *, force: bool = False) -> Owner:
        """Return host memory that bytes pass through; see NOTE [ On the way ]. If forced, go
        over the budget where no thread's work makes room. Raises as :meth:`take`.
        """
        self.poll()
        passage, furthest = Owner(), self.furthest()
        if furthest is not None and self.pool.in_use_bytes + sum(sizes) > self._bound.nbytes:
            raise Busy(furthest)
        try:
            passage.host = super().take(passage, sizes, specs, force=force and furthest is None)
        except MemoryError as full:
            if furthest is not None:
                raise Busy(furthest) from None
            advice = "or make groups smaller: a group passes whole through host memory to the disk"
            raise type(full)(f"{full}, {advice}") from None
        return passage

    def furthest(self) -> Event | None:
        """Return the event of the first write, else read: its end frees staging memory next."""
        for ref in self.writing:
            if (batch := ref()) is not None:
                return batch.write.event  # type: ignore[no-any-return]
        return next((read.event for read in self.reads if read.event is not None), None)

    def poll(self) -> None:
        """Free host memory whose bytes are on disk, and give batches the memory read for them; see
        NOTE [ When the disk fails ].
        """
        while self.writing:
            batch = self.writing[0]()
            if batch is not None:
                if not batch.write.event.query():
                    break
                if batch.write.failure is None:
                    batch.place = batch.passage = None
                else:
                    self._note(batch.write.failure)
            self.writing.popleft()
        for read in tuple(self.reads):  # they end in any order
            if read.event is None or not read.event.query():
                continue
            if (batch := read.batch()) is not None:
                try:
                    read.event.synchronize()  # ended; raises its failure
                except TierError:  # the next use reads again, and raises
                    batch.reading = None
                else:
                    batch.passage, batch.place = read.passage, read.passage.host
            self.reads.remove(read)  # last, as an interrupt may come before it

    def _note(self, failure: Exception) -> None:
        self.failure = failure
        warn_once(
            logger,
            self,
            "offloaded activations could not be written and stay in memory, as will what follows "
            "in this step; from now on without a warning: %s",
            str(failure),
        )

    def check_capture(self, act: str) -> None:
        """Raise while a graph is captured: when it runs again, the bytes are elsewhere."""
        if self._backend.is_capturing:
            raise NotWhileCapturingError(
                f"{act} disk cannot be part of a captured graph; keep what it needs "
                'in host memory, with tiers=("host",)'
            )


def make_tier(backend: Backend, config: OffloadConfig, allocate: Allocate) -> HostTier:
    """Make the tier that batches go to. Raises a DiskTierError if its file cannot be made, and a
    ValueError if a disk is named and the device is virtual.
    """
    first, last = config.tiers[0], config.tiers[-1]
    whole = HostBudget(config.host_budget_bytes)

    def pool_of(budget: HostBudget) -> HostPool:
        is_capturing = partial(getattr, backend, "is_capturing")
        return HostPool(allocate, budget, trim=backend.trim_host, is_capturing=is_capturing)

    if last == "host":
        return HostTier(pool_of(whole))
    if backend.device.type == "meta":
        raise ValueError('tiers name a disk, which a virtual device lacks, expected ("host",)')
    host = HostTier(pool_of(whole.but_for(STAGING_SHARE))) if first == "host" else None
    bound = Bound(config.max_in_flight_bytes, STAGING_BYTES)
    return DiskTier(pool_of(whole), bound, backend, DiskFile(config.disk_dir), host)
