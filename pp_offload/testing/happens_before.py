"""Race detector: accesses of streams to bytes, and whether waits order them.

Every stream carries a vector clock; an event is a snapshot of it, and waiting merges the snapshot.
The host has a clock too: work that it has seen finish comes before all work it issues later. Two
accesses to the same bytes, of which one writes and one is a copy, must be ordered by these clocks.
They are checked when they are issued, so a run that was right by luck is an error all the same.

    history = detector.see(tensor.untyped_storage(), stream, is_host=False)
    detector.access(stream, history, tensor, "read", "attn")  # raises RaceError

Conflicts between two compute operations are out of scope and not reported.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import Tensor, UntypedStorage

from pp_offload.errors import RaceError


class VectorClock(dict[str, int]):
    """Known progress of each stream; a missing stream has made none. Loops use a copy: an engine
    collected meanwhile waits, and a clock advances.
    """

    def merge(self, other: VectorClock) -> VectorClock:
        """Add all progress that ``other`` knows; return this clock."""
        for name, tick in dict(other).items():
            if self.get(name, 0) < tick:
                self[name] = tick
        return self

    def covers(self, other: VectorClock) -> bool:
        """Whether this clock knows all progress that ``other`` knows."""
        return all(self.get(name, 0) >= tick for name, tick in dict(other).items())


class Extent(NamedTuple):
    """Bytes of a storage from ``start`` up to, not including, ``stop``."""

    start: int
    stop: int

    def overlaps(self, other: Extent) -> bool:
        return self.start < other.stop and other.start < self.stop

    def contains(self, other: Extent) -> bool:
        return self.start <= other.start and other.stop <= self.stop


WHOLE = Extent(0, 2**63)  # of a whole storage, however it grows


def extent_of(tensor: Tensor) -> Extent:
    """Return the smallest byte range that holds all elements, with the gaps between strides."""
    if tensor.is_nested:  # it has no size
        return WHOLE
    start = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.numel() == 0:
        return Extent(start, start)
    last = sum((int(n) - 1) * int(s) for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return Extent(start, start + (last + 1) * tensor.itemsize)


class Access(NamedTuple):
    """Use of some bytes by a stream."""

    kind: str  # ``read``, ``write`` or ``free``
    stream: str
    tick: int  # the stream's own time
    extent: Extent
    label: str  # the group of a copy, or the operator of a computation
    is_copy: bool  # whether a copy stream runs it

    def conflicts(self, other: Access) -> bool:
        """Whether the two accesses must be ordered."""
        if self.kind == "read" and other.kind == "read":
            return False
        return (self.is_copy or other.is_copy) and self.extent.overlaps(other.extent)

    def supersedes(self, older: Access) -> bool:
        """Whether each later race with ``older`` is also a race with this access."""
        if self.stream == older.stream:
            is_as_strict = self.kind != "read" or older.kind == "read"
        else:
            is_as_strict = self.is_copy and self.kind == "write"
        return is_as_strict and self.extent.contains(older.extent)

    def __str__(self) -> str:
        what = "group" if self.is_copy else "operator"
        return (
            f"{self.kind} by stream {self.stream} ({what} {self.label!r}, "
            f"bytes {self.extent.start}..{self.extent.stop})"
        )


class StreamClock:
    """Base of a stream: its name, and the vector clock of what precedes its next work."""

    def __init__(self, name: str, *, is_copy: bool) -> None:
        self.name, self.is_copy = name, is_copy
        self.past = VectorClock({name: 1})

    def advance(self, host: VectorClock) -> None:
        """Begin a piece of work that the host issues now."""
        self.past.merge(host)
        self.past[self.name] += 1

    def access(self, kind: str, extent: Extent, label: str) -> Access:
        """Return an access by the piece of work begun last."""
        return Access(kind, self.name, self.past[self.name], extent, label, self.is_copy)


@dataclass
class StorageHistory:
    """Accesses to a storage that can still race with later accesses, oldest first."""

    owner: StreamClock  # the compute stream that was current when the storage was first seen
    # The host frees host memory without knowing what streams waited for; ``owner`` frees the rest.
    is_host: bool
    accesses: list[Access] = field(default_factory=list)
    nbytes: int = 0  # size when first seen
    reference: weakref.ref[UntypedStorage] | None = None  # kept for its callback

    def first_race(self, access: Access, past: VectorClock) -> Access | None:
        """Return an earlier access that conflicts with ``access`` and is not in ``past``."""
        unordered = (old for old in self.accesses if past.get(old.stream, 0) < old.tick)
        return next((old for old in unordered if old.conflicts(access)), None)


class RaceDetector:
    """Checks each access to a living storage against earlier ones."""

    def __init__(self) -> None:
        self.host = VectorClock()
        self._here = threading.local()
        self.device_bytes = self.device_bytes_peak = 0  # of all living device storages seen
        self._histories: dict[int, StorageHistory] = {}
        self._host_bytes: dict[int, range] = {}
        self._fault: RaceError | None = None

    def thread_clock(self) -> VectorClock:
        """Clock of events that this thread has waited for and the host has not. Only a tier's
        thread has one: garbage collected there frees memory of an engine.
        """
        clock: VectorClock = vars(self._here).setdefault("clock", VectorClock())
        return clock

    def see(self, storage: UntypedStorage, owner: StreamClock, *, is_host: bool) -> StorageHistory:
        """Return the history of a storage; begin one if it has none. Device memory counts as just
        written by ``owner``, which computed or allocated it. A storage on bytes of host memory is
        host memory, too.
        """
        key = storage._cdata
        if (seen := self._histories.get(key)) is not None:
            return seen
        extent = range(0)  # of the storage of a fake tensor
        with suppress(RuntimeError):
            extent = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        is_host = is_host or any(extent.start in host for host in list(self._host_bytes.values()))
        history = StorageHistory(owner, is_host)
        if is_host:
            self._host_bytes[key] = extent
        else:
            history.accesses.append(owner.access("write", WHOLE, "produced or allocated"))
            history.nbytes = storage.nbytes()
            self.device_bytes += history.nbytes
            self.device_bytes_peak = max(self.device_bytes_peak, self.device_bytes)
        history.reference = weakref.ref(storage, partial(self._freed, key))
        self._histories[key] = history
        return history

    def access(
        self, clock: StreamClock, history: StorageHistory, tensor: Tensor, kind: str, label: str
    ) -> None:
        """Check an access to a tensor by the latest work of ``clock``. Raise a RaceError if nothing
        orders it after an earlier conflicting one.
        """
        access = clock.access(kind, extent_of(tensor), label)
        if access.extent.start == access.extent.stop:
            return
        race = history.first_race(access, clock.past)
        if race is not None:
            raise RaceError(_unordered(access, race))
        history.accesses = [old for old in history.accesses if not access.supersedes(old)]
        history.accesses.append(access)

    def raise_fault(self) -> None:
        """Raise the race that a free has caused since the last call, if any."""
        fault, self._fault = self._fault, None
        try:
            if fault is not None:
                raise fault
        finally:
            del fault  # otherwise it would keep this frame and all its callers

    def _freed(self, key: int, _reference: object) -> None:
        """Check the free of a storage. This callback cannot raise, so a race is raised later."""
        history = self._histories.pop(key, None)
        self._host_bytes.pop(key, None)
        if history is None:
            return
        self.device_bytes -= history.nbytes
        free = history.owner.access("free", WHOLE, "storage released")
        clock = VectorClock(self.host).merge(self.thread_clock())
        if not history.is_host:
            clock.merge(history.owner.past)
        race = history.first_race(free, clock)
        if race is not None and self._fault is None:
            self._fault = RaceError(_unordered(free, race))


def _unordered(access: Access, earlier: Access) -> str:
    return (
        f"{access} is not ordered after the {earlier}; "
        f"expected stream {access.stream} (or the host) to wait for an event that "
        f"{earlier.stream} records after it"
    )
