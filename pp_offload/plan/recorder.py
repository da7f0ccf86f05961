"""Notes what a rank does, for tapes.

recorder = Recorder(backend)             # before anything is allocated
manager.offloader.observers.add(recorder)
chunk = recorder.begin_chunk()
...                                      # a forward
raw = recorder.taken()
...                                      # all backwards
recorder.told(raw)
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, UntypedStorage

from pp_offload._core.batch import Batch
from pp_offload._core.group import Group, GroupState
from pp_offload._core.observer import Observer
from pp_offload._core.payloads import Payloads
from pp_offload._core.saved import Saved
from pp_offload.plan.tape import (
    Close,
    Drop,
    Event,
    Gone,
    GroupTape,
    Lost,
    Open,
    Payload,
    Release,
    Stretch,
    Use,
)
from pp_offload.simulate.device import VirtualBackend
from pp_offload.simulate.memory import ROUNDING_BYTES, DeviceMemory


class _Run(NamedTuple):
    seconds: float


class _Allocated(NamedTuple):
    number: int
    nbytes: int


class _Freed(NamedTuple):
    number: int
    nbytes: int


Raw = Event | _Run | _Allocated | _Freed


class ChunkNotes:
    """What is known of the chunk of a microbatch."""

    def __init__(self) -> None:
        self.groups: list[GroupTape] = []
        self.payloads: list[Payload] = []
        self.source_bytes: list[int] = []
        self.payload_of: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """The payload of each saved tensor."""

        self.uses: Counter[int] = Counter()
        """Of each payload so far."""

        self._copies: defaultdict[int, list[tuple[weakref.ref[Batch], int]]] = defaultdict(list)
        """By source, each copy that was made of it."""

    def version_of(self, source: int, batch: weakref.ref[Batch], index: int) -> int:
        """The same number for all that share a copy of a source."""
        copies = self._copies[source]
        if (batch, index) not in copies:
            copies.append((batch, index))
        return copies.index((batch, index))

    def payloads_of_groups(self) -> tuple[Payload, ...]:
        """All payloads; a source that one group alone saves needs no version."""
        num = Counter(one.source for one in self.payloads)
        return tuple(
            one if num[one.source] > 1 else one._replace(version=None) for one in self.payloads
        )


class Recorder(Observer):
    """Notes what happens.

    Args:
        backend: Where it happens.

    Attributes:
        memory: To be the backend's.
        chunk: The one that is at work.
        problem: Why tapes cannot say it.
    """

    def __init__(self, backend: VirtualBackend) -> None:
        self.memory = _HeardMemory(self._allocated, self._freed, self._resized)
        self.chunk = ChunkNotes()
        self.problem: str | None = None
        self._raw: list[Raw] = []
        self._sources: dict[int, tuple[ChunkNotes, int]] = {}
        """The source of its chunk, by number of the storage."""

        self._reloads: dict[int, Release] = {}
        """By number of the storage that a payload came back to."""

        backend.compute.heard = (*backend.compute.heard, self._ran)

    def begin_chunk(self) -> ChunkNotes:
        """A microbatch begins its forward."""
        self.chunk = ChunkNotes()
        return self.chunk

    def taken(self) -> list[Raw]:
        """What happened since this was last called.

        Raises:
            ValueError: Tapes cannot say it.
        """
        if self.problem is not None:
            raise ValueError(f"{self.problem}; see what the program costs with run_pipeline")
        raw, self._raw = self._raw, []
        return raw

    def forget(self) -> None:
        """What was heard so far, and the storages of it: a step begins."""
        self.taken()
        self._sources.clear()
        self._reloads.clear()

    def _refuse(self, problem: str) -> None:
        """Have :meth:`taken` raise this: here it would come out of the program's forward."""
        self.problem = self.problem or problem

    def told(self, raw: list[Raw]) -> tuple[Event, ...]:
        """The same by sources and payloads, once these are known: when all backwards are over."""
        events: list[Event] = []
        for event in map(self._event, raw):
            last = events[-1] if events else None
            if isinstance(event, Release) and last == Lost(*event):
                events[-1] = event
            elif isinstance(event, Stretch) and isinstance(last, Stretch):
                events[-1] = _together(last, event)
            else:
                events.append(event)
        return tuple(events)

    def _event(self, raw: Raw) -> Event:
        if isinstance(raw, _Run):
            return Stretch((raw.seconds,), 0, 0)
        if isinstance(raw, _Allocated):
            nbytes = 0 if raw.number in self._reloads else raw.nbytes
            return Stretch((), nbytes, nbytes)
        if isinstance(raw, _Freed):
            if raw.number in self._reloads:
                return self._reloads[raw.number]
            if raw.number in self._sources:
                return Drop(self._sources[raw.number][1])
            return Stretch((), -raw.nbytes, 0)
        return raw

    def _ran(self, ready_s: float, begin_s: float, end_s: float) -> None:
        self._raw.append(_Run(end_s - begin_s))

    def _allocated(self, number: int, nbytes: int) -> None:
        self._raw.append(_Allocated(number, nbytes))

    def _freed(self, number: int, nbytes: int) -> None:
        self._raw.append(_Freed(number, nbytes))

    def _resized(self, before: int, now: int) -> None:
        self._refuse(
            f"a storage of {before} bytes was resized to {now}, expected tensors that keep theirs"
        )

    def opened(self, group: Group) -> None:
        assert group.key is not None
        self._raw.append(Open(group.key.position))
        self.chunk.groups.append(GroupTape(group.name, ()))

    def closed(self, group: Group, payloads: Payloads | None) -> None:
        if group.key is None:
            self._refuse(f"'{group.name}' leaves by itself, expected a group of a microbatch")
            return
        chunk, position = self.chunk, group.key.position
        self._raw.append(Close(position))  # before the sources go: the payloads still hold them
        if payloads is None or group.state is not GroupState.OFFLOADED:
            return
        indices: list[int] = []
        for index in range(len(payloads.sizes)):
            tensor, members = payloads.tensors[index], payloads.members[index]
            if index in payloads.views:
                self._refuse(
                    f"group '{group.name}' saves a view of shape "
                    f"{tuple(tensor.shape)} that is copied without the rest of "
                    "its storage, expected whole storages"
                )
            else:
                indices.append(len(chunk.payloads))
                storage = tensor.untyped_storage()
                self._note(group.name, payloads.sizes[index], storage, members)
        chunk.groups[position] = GroupTape(group.name, tuple(indices))

    def _note(
        self, name: str, nbytes: int, storage: UntypedStorage, members: Sequence[Saved]
    ) -> None:
        """A payload has left."""
        chunk, batch = self.chunk, members[0].batch
        source = self._source_of(name, nbytes, storage)
        version = chunk.version_of(source, weakref.ref(batch), members[0].index)
        self._add(Payload(nbytes, rounded(nbytes), source, len(members), version), members)
        # Nothing is brought ahead, and each use brings its payload anew: it has memory of its own,
        # and what backward lets go of shows.
        batch.back.uses[:] = [1] * len(batch.sizes)
        mover: Any = batch.mover
        mover.arrived.expect_uses(batch.back, [0] * len(batch.sizes))

    def _source_of(self, name: str, nbytes: int, storage: UntypedStorage) -> int:
        chunk = self.chunk
        number = self.memory.number_of(storage)
        saved_by, source = self._sources.setdefault(number, (chunk, len(chunk.source_bytes)))
        if saved_by is not chunk:
            self._refuse(
                f"group '{name}' saves {nbytes} bytes that another microbatch or stage saved as "
                "well, expected that each saves its own"
            )
        if source == len(chunk.source_bytes):
            chunk.source_bytes.append(rounded(storage.nbytes()))
        return source

    def _add(self, payload: Payload, holders: Sequence[Any]) -> None:
        """A payload that is gone when all its holders are."""
        chunk, index = self.chunk, len(self.chunk.payloads)
        chunk.payloads.append(payload)
        living = len(holders)

        def gone() -> None:
            nonlocal living
            living -= 1
            if not living:
                self._raw.append(Gone(index))

        for holder in holders:
            chunk.payload_of[holder] = index
            weakref.finalize(holder, gone).atexit = False

    def used(self, saved: Saved, payload: Tensor) -> None:
        self._use(saved, payload)
        saved.batch.back.given[saved.index] = None

    def _use(self, holder: Any, tensor: Tensor) -> None:
        index, uses = self.chunk.payload_of.get(holder), self.chunk.uses
        if index is not None:  # else it is refused
            number = self.memory.number_of(tensor.untyped_storage())
            self._reloads[number] = Release(index, uses[index])
            self._raw.append(Use(index))
            # Bound late: another list may be noted in by then.
            lost = partial(self._lost, Lost(index, uses[index]))
            weakref.finalize(tensor, lost).atexit = False
            uses[index] += 1

    def _lost(self, lost: Lost) -> None:
        self._raw.append(lost)


def _together(one: Stretch, next_one: Stretch) -> Stretch:
    return Stretch(
        one.seconds + next_one.seconds,
        one.nbytes + next_one.nbytes,
        max(one.rise, one.nbytes + next_one.rise),
    )


class _Storage(weakref.ref[UntypedStorage]):
    __slots__ = ("nbytes", "number")
    number: int
    nbytes: int


class _HeardMemory(DeviceMemory):
    """Tells of each storage when it is made and when it is gone.

    Args:
        allocated: Told a number, never used again, and how many bytes.
        freed: Told the same.
        resized: Told how many bytes it had, and has.
    """

    def __init__(
        self,
        allocated: Callable[[int, int], None],
        freed: Callable[[int, int], None],
        resized: Callable[[int, int], None],
    ) -> None:
        super().__init__()
        self._allocated = allocated
        self._freed = freed
        self._resized = resized
        self._numbered: dict[int, _Storage] = {}
        self._num = 0

    def number_of(self, storage: UntypedStorage) -> int:
        """Its number."""
        return self._numbered[storage._cdata].number

    def _seen(self, storage: UntypedStorage) -> Any:
        known = self._numbered.get(storage._cdata)
        if known is None or known() is not storage:
            one = _Storage(storage, self._tell)
            one.number, one.nbytes = self._num, rounded(storage.nbytes())
            self._num += 1
            self._numbered[storage._cdata] = one
            self._allocated(one.number, one.nbytes)
        elif known.nbytes != rounded(storage.nbytes()):
            self._resized(known.nbytes, storage.nbytes())
        return super()._seen(storage)

    def _tell(self, one: _Storage) -> None:
        self._freed(one.number, one.nbytes)


def rounded(nbytes: int) -> int:
    """What a device allocator takes for so many bytes."""
    return -(-nbytes // ROUNDING_BYTES) * ROUNDING_BYTES
