"""Host memory for batches: large slabs from the backend, dealt out by first fit.

    host = pool.take([4096, 1024], owner)  # host.views: a uint8 tensor for each payload
    for event in host.waits_for:           # earlier copies that may still access these bytes
        d2h.wait_event(event)
    ...
    host.last_use = d2h.record_event()     # and again after each later copy
    del owner                              # its bytes are free at the next take

A step usually takes the same sizes as the last. So freed memory keeps its views and waits, idle,
for the same sizes: a take is then two Python calls. When other sizes need room, all idle memory is
merged into free ranges, which serve any size.

NOTE [ Footprint ]
    PyTorch's pinned allocator rounds each block up to a power of two, so slabs are powers of two.
    While a pool grows its peak is unknown, and a payload cannot straddle two slabs: after the first
    step slabs exceed the peak by up to 13 % on the shapes of models. So :meth:`settle` replaces all
    slabs, once for each new peak, while no byte is in use: nothing is moved.
"""

from __future__ import annotations

import logging
import weakref
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pp_offload._common.processes import logger_of
from pp_offload._memory.addresses import Ranges, outside_inference_mode, owned_by
from pp_offload._memory.budget import HostBudget, OverBudgetError, Reserved
from pp_offload.backends import Event
from pp_offload.errors import NotWhileCapturingError

logger = logger_of(__name__)

Allocate = Callable[[int], Tensor]
"""Gives a flat ``uint8`` host tensor of a number of bytes, or raises MemoryError."""

ALIGNMENT = 64  # bytes, of each payload in its slab: a cache line
MIN_SLAB_BYTES = 2**21  # no slab is smaller, except near the end of the budget
MIN_SETTLED_BYTES = 2**16  # no settled slab is smaller
GROWTH_FRACTION = 32  # a new slab has at least this part of all bytes, so that they stay few
SETTLED_FRACTION = 64  # settled slabs exceed the peak by this part, for ends that nothing fits in
SETTLED_GRANULES = 128  # the smallest settled slab is about this part of the peak
WASTE_ALLOWED = 1.03  # reserved / peak bytes, above which settling is worth new allocations

NOTED_S, SLOW_S = 0.1, 1.0
"""A step whose allocations take this long logs the time, as information and as a warning. Ordinary
memory is faster; a first step that is seconds slower than others looks like slow training.
"""


class Slab(NamedTuple):
    """One allocation of flat ``uint8`` from the system, and its part of the budget."""

    data: Tensor
    reserved: Reserved


@dataclass(slots=True, eq=False)
class HostBytes:
    """Host memory of one owner."""

    sizes: tuple[int, ...]  # bytes of each payload
    nbytes: int  # their sum
    views: list[Tensor]  # flat ``uint8``, for each payload
    ranges: Ranges
    slabs: list[Slab]  # the budget counts them while an owner outlives the pool
    waits_for: tuple[Event, ...]  # copies of former owners, for the stream that first writes
    last_use: Event | None = None  # the latest copy to or from these bytes; None before any
    is_in_graph: bool = False  # then never free: each launch of the graph copies to or from them
    specs: Any = None  # shapes of ``tensors``
    tensors: Sequence[Tensor] = ()  # the views in their owner's shapes, kept for the next owner


class PendingUse(NamedTuple):
    """A copy that may still access a free range. The next owner of the range waits for it."""

    start: int
    end: int
    event: Event


class HostPool:
    """Deals out host memory. The caller holds a lock around each method.

    Memory is free when its owner is garbage. The callback of the weak reference to the owner is a C
    ``append``, so that no Python code runs where autograd frees a node: there, an exception of a
    signal handler would be lost.

    Args:
        budget: This rank's share of the available memory when not given.
        trim: Empties the cache of an allocator that retains freed memory.
        is_capturing: Whether a graph is being captured. Then no event may be queried.
    """

    min_slab_bytes = MIN_SLAB_BYTES

    def __init__(
        self,
        allocate: Allocate,
        budget: HostBudget | None = None,
        *,
        trim: Callable[[], None] = lambda: None,
        is_capturing: Callable[[], bool] = bool,
    ) -> None:
        self.reserved_bytes = self.num_allocations = 0  # of all slabs, and calls of ``allocate``
        self._allocate, self._trim, self._is_capturing = allocate, trim, is_capturing
        self.budget = budget or HostBudget()
        self.has_asked = False  # for idle memory of other pools, which they give up once
        self._slabs: dict[int, Slab] = {}  # by address, rising
        self._end = 0
        self._free = Ranges()
        self._pending: deque[PendingUse] = deque()
        self._idle: defaultdict[tuple[int, ...], deque[HostBytes]] = defaultdict(deque)
        self._sizes: dict[tuple[int, ...], tuple[int, ...]] = {}  # equal ones are one object
        self._lent: dict[int, tuple[weakref.ref[Any], HostBytes]] = {}  # by id of the reference
        self._returned: deque[weakref.ref[Any]] = deque()
        self._in_use_bytes = self._peak_bytes = self._settled_bytes = 0
        self._trimmed_peak_bytes = 0  # the highest peak that a trim forgot
        self._new_bytes, self._new_s = 0, 0.0  # allocated since the last settle(), and how long

    def take(self, sizes: Sequence[int], owner: object, *, force: bool = False) -> HostBytes:
        """Return host memory that is free at the next call after ``owner`` is garbage.

        Args:
            sizes: Bytes of each payload. A payload is contiguous; two may lie in two slabs.
            owner: Any object that can be referred to weakly.
            force: Exceed the budget, by no more than is missing.

        Raises:
            MemoryError: The budget or the system has no room. Nothing has changed.
        """
        if self._returned:
            self._collect()
        sizes = tuple(sizes)
        same = self._idle.get(sizes)
        # Oldest first: the copies of the latest are the least likely to have finished.
        host = same.popleft() if same else self._carve(sizes, force)
        # Last, or the traceback of a refusal would keep a reference that has no memory.
        ref = weakref.ref(owner, self._returned.append)
        self._lent[id(ref)] = ref, host
        self._in_use_bytes += host.nbytes
        return host

    @property
    def in_use_bytes(self) -> int:
        """Bytes of payloads whose owner lives. Exact at the call."""
        self._collect()
        return self._in_use_bytes

    @property
    def is_idle(self) -> bool:
        """Whether there is memory, and none in use. May be asked without the lock."""
        return self.reserved_bytes > 0 and len(self._lent) <= len(self._returned)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were ever in use at once."""
        self._collect()
        return max(self._peak_bytes, self._trimmed_peak_bytes)

    @property
    def num_payloads(self) -> int:
        """Payloads whose owner lives. Exact at the call."""
        self._collect()
        return sum(len(host.sizes) for _, host in self._lent.values())

    def settle(self) -> None:
        """Between steps: fit slabs to the peak, and log how long the step allocated."""
        self._fit_slabs()
        if self._new_s >= NOTED_S:
            logger.log(
                logging.WARNING if self._new_s >= SLOW_S else logging.INFO,
                "the step pinned %.2f GiB of host memory, which took %.1f s; later "
                "steps use this memory again",
                self._new_bytes / 2**30,
                self._new_s,
            )
        self._new_bytes, self._new_s = 0, 0.0

    def _fit_slabs(self) -> None:
        """Replace slabs if no byte is in use and no copy runs: see NOTE [ Footprint ]."""
        self._collect()
        peak = self._peak_bytes
        if self._lent or peak == self._settled_bytes:
            return
        sizes = slabs_for(peak + peak // SETTLED_FRACTION)
        enough = max(sum(sizes), WASTE_ALLOWED * peak, self.min_slab_bytes)
        if self.reserved_bytes <= enough or not all(event.query() for event in self.copies()):
            return
        self._drop_slabs()
        with suppress(MemoryError):  # other pools share the budget; the next take grows
            for size in sizes:
                self._add_slab(size)
        self._settled_bytes = peak

    def trim(self) -> None:
        """Between phases: return slabs without bytes in use, and without copies, to the system.
        Slabs are fitted anew, to the peak from now on.
        """
        self._collect()
        self._drop_slabs()
        self._trimmed_peak_bytes = max(self._peak_bytes, self._trimmed_peak_bytes)
        self._peak_bytes = self._settled_bytes = 0

    def copies(self) -> list[Event]:
        """Return events of copies that may still access the slabs."""
        events = [use.event for use in self._pending]
        for host in chain((host for _, host in self._lent.values()), *self._idle.values()):
            events += host.waits_for
            if host.last_use is not None:
                events.append(host.last_use)
        return events

    def _collect(self) -> None:
        """Make memory idle if its owner is garbage."""
        if self._in_use_bytes > self._peak_bytes:
            self._peak_bytes = self._in_use_bytes  # bytes in use only rise between two calls
        returned, lent, idle = self._returned, self._lent, self._idle
        while returned:
            ref = returned.popleft()
            _, host = lent.pop(id(ref))
            if host.is_in_graph:
                lent[id(ref)] = ref, host  # never free again
                continue
            self._in_use_bytes -= host.nbytes
            if host.last_use is not None:  # else never used: ``waits_for`` stays
                host.waits_for, host.last_use = (host.last_use,), None
            idle[host.sizes].append(host)

    def _carve(self, sizes: tuple[int, ...], force: bool) -> HostBytes:
        """Return memory from the free ranges, then from idle memory, then from a new slab."""
        rooms = [-(-size // ALIGNMENT) * ALIGNMENT or ALIGNMENT for size in sizes]
        starts = self._place(rooms)
        if starts is None:
            if self._idle:
                self._break_up()
            starts = self._place(rooms, may_grow=True, force=force)
        assert starts is not None
        addresses, ranges = list(self._slabs), Ranges()
        views, slabs = [], []
        with outside_inference_mode():  # or the views could not be written outside it
            for start, size, room in zip(starts, sizes, rooms, strict=True):
                address = addresses[bisect_right(addresses, start) - 1]
                slab = self._slabs[address]
                views.append(slab.data.narrow(0, start - address, size))
                slabs.append(slab)
                ranges.add(start, room)
        sizes = self._sizes.setdefault(sizes, sizes)  # or each free would touch cold memory
        return HostBytes(sizes, sum(sizes), views, ranges, slabs, self._claim(ranges))

    def _place(
        self, rooms: list[int], *, may_grow: bool = False, force: bool = False
    ) -> list[int] | None:
        """Take a range for each payload, largest first, so that the small ones fill the gaps.
        Return their starts; None if they do not all fit. Raise a MemoryError if the pool may grow,
        but cannot. Nothing is taken then.
        """
        missing = sum(rooms)
        starts: dict[int, int] = {}
        try:
            for index in sorted(range(len(rooms)), key=rooms.__getitem__, reverse=True):
                room = rooms[index]
                start = self._free.take(room)
                if start is None and may_grow:
                    self._grow(room, missing, force)
                    start = self._free.take(room)
                if start is None:
                    break
                starts[index] = start
                missing -= room
        finally:
            if missing:
                for index, start in starts.items():
                    self._free.add(start, rooms[index])
        return None if missing else [starts[index] for index in range(len(rooms))]

    def _claim(self, ranges: Ranges) -> tuple[Event, ...]:
        """Return events of copies that may still access ``ranges``; the new owner waits."""
        if not self._pending:
            return ()
        events: dict[int, Event] = {}
        for start, nbytes in ranges:
            end = start + nbytes
            rest: deque[PendingUse] = deque()
            for use in self._pending:
                if use.end <= start or end <= use.start:
                    rest.append(use)
                    continue
                events[id(use.event)] = use.event
                # A use never begins before ``start``: ranges are taken from their beginnings.
                if end < use.end:
                    rest.append(use._replace(start=end))
            self._pending = rest
        return tuple(self._unfinished(events.values()))

    def _unfinished(self, events: Iterable[Event]) -> list[Event]:
        """Return events that may not have passed."""
        is_capturing = self._is_capturing()
        return [event for event in events if is_capturing or not event.query()]

    def _break_up(self) -> None:
        """Merge idle memory of all sizes into free ranges."""
        while self._pending and not self._unfinished([self._pending[0].event]):
            self._pending.popleft()  # copies end in about the order they were queued
        for same in self._idle.values():
            for host in same:
                events = self._unfinished(host.waits_for)
                for start, nbytes in host.ranges:
                    self._free.add(start, nbytes)
                    self._pending += [PendingUse(start, start + nbytes, event) for event in events]
        self._idle.clear()
        self._sizes.clear()

    def _grow(self, room: int, missing: int, force: bool) -> None:
        """Add a slab of at least ``room`` bytes, for all ``missing`` bytes if it can be had."""
        force = force and room > self.budget.left_bytes
        growth = floor_power(self.reserved_bytes // GROWTH_FRACTION)
        least = 1 << (room - 1).bit_length()  # the least power of two that has room
        size = max(floor_power(missing), least, self.min_slab_bytes, growth)
        if force:  # over the budget, no more than is missing
            size = room = missing
        while True:
            try:
                return self._add_slab(size, force=force)
            except MemoryError as failure:
                if size == room and not self._has_fallen_back(room, failure):
                    raise
                size = max(size // 2, room)

    def _add_slab(self, nbytes: int, *, force: bool = False) -> None:
        reserved = self.budget.reserve(nbytes, force=force)
        self.num_allocations += 1
        begin_s = perf_counter()
        try:
            with outside_inference_mode():
                data = self._allocate(nbytes)
        except MemoryError:
            del reserved  # or the traceback would keep it counted
            raise
        self._new_s += perf_counter() - begin_s
        self._new_bytes += nbytes
        self._slabs[self._end] = Slab(data, reserved)
        self._free.add(self._end, nbytes)
        self._end += nbytes + ALIGNMENT  # a gap, or ranges of two slabs would be merged
        self.reserved_bytes += nbytes

    def _has_fallen_back(self, nbytes: int, failure: MemoryError) -> bool:
        """Use ordinary memory from now on, and return True, if pinned memory is missing."""
        other = OverBudgetError, NotWhileCapturingError
        if self._allocate is pageable or isinstance(failure, other):
            return False
        self._allocate = pageable
        logger.warning(
            "no pinned memory for %d more bytes; ordinary memory is used from now on, whose copies "
            "are slower and block; raise the limit of locked memory (ulimit -l), or offload less",
            nbytes,
        )
        return True

    def _drop_slabs(self) -> None:
        """Return free slabs to the system, except those that a copy still uses."""
        self._break_up()
        busy = deque(use for use in self._pending if not use.event.query())
        for address, nbytes in [(start, slab.data.numel()) for start, slab in self._slabs.items()]:
            end = address + nbytes
            is_busy = any(use.start < end and address < use.end for use in busy)
            if not is_busy and self._free.take_whole(address, nbytes):
                del self._slabs[address]
                self.reserved_bytes -= nbytes
        self._pending = busy
        self._trim()


def pageable(nbytes: int) -> Tensor:
    """Return ordinary host memory; raises a MemoryError if the system has too little."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as failure:
        raise MemoryError(f"the system has no {nbytes} bytes of memory: {failure}") from failure


def slabs_for(nbytes: int) -> list[int]:
    """Return few powers of two, largest first, that hold ``nbytes`` together, and hardly more."""
    granule = max(MIN_SETTLED_BYTES, floor_power(nbytes // SETTLED_GRANULES))
    whole = -(-nbytes // granule) * granule
    return [1 << bit for bit in reversed(range(whole.bit_length())) if whole >> bit & 1]


def floor_power(nbytes: int) -> int:
    """Return the largest power of two that is not above ``nbytes``; 0 for 0."""
    return 1 << nbytes.bit_length() - 1 if nbytes else 0


class Owner:
    """Keeps host memory, counted by the budget even when the pool is gone."""

    __slots__ = ("__weakref__", "host")

    host: HostBytes


def host_tensors(likes: Sequence[Tensor], pool: HostPool, *, force: bool = False) -> list[Tensor]:
    """Return host tensors of the shapes, dtypes and dense layouts of ``likes``; they hold no data,
    and have a storage each. All of the memory is taken as long as one of them lives. No copy may
    use free memory of ``pool``. Raises a MemoryError if it has no room, unless forced.
    """
    owner = Owner()
    owner.host = host = pool.take([like.nbytes for like in likes], owner, force=force)
    tensors = []
    for view, like in zip(host.views, likes, strict=True):
        memory = owned_by(owner, view) if view.numel() else view.clone()
        strides = torch.empty_like(like, device="meta").stride()
        tensors.append(memory.view(like.dtype).as_strided(like.shape, strides))
    return tensors
