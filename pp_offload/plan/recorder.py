"""Recorder of a rank's work, for tapes.

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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, UntypedStorage

from pp_offload._core.batch import Batch
from pp_offload._core.group import Group, GroupState
from pp_offload._core.observer import Observer
from pp_offload._core.operators import Call
from pp_offload._core.payloads import Payloads
from pp_offload._core.saved import Saved
from pp_offload.plan.tape import (
    Again,
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
    """Notes of the chunk of a microbatch."""

    def __init__(self) -> None:
        self.groups: list[GroupTape] = []
        self.payloads: list[Payload] = []
        self.source_bytes: list[int] = []
        self.payload_of: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Payload of each saved tensor."""

        self.uses: Counter[int] = Counter()
        """Number of uses of each payload so far."""

        self.inputs: WeakSet[Any] = WeakSet()
        """Saved tensors that recipes hold."""

        self.recipes: dict[int, _RecordedFunction] = {}
        """Function of each payload that is computed again."""

        self.copies: dict[int, Stretch] = {}
        """Copies of parameters, by position of the group whose recipes needed them first."""

        self.payload_of_copy: dict[tuple[weakref.ref[Batch], int], int] = {}
        """Payload of each place in a batch."""

        self._copies: defaultdict[int, list[tuple[weakref.ref[Batch], int]]] = defaultdict(list)
        """Copies of each source."""

    def version_of(self, source: int, batch: weakref.ref[Batch], index: int) -> int:
        """Return a number that is the same for all payloads that share a copy of a source."""
        copies = self._copies[source]
        if (batch, index) not in copies:
            copies.append((batch, index))
        return copies.index((batch, index))

    def payloads_of_groups(self) -> tuple[Payload, ...]:
        """List all payloads, without the version of a source that only one group saves."""
        num = Counter(payload.source for payload in self.payloads)
        payloads = [
            each if num[each.source] > 1 else each._replace(version=None) for each in self.payloads
        ]
        for index, function in self.recipes.items():
            payloads[index] = payloads[index]._replace(again=function.again())
        return tuple(payloads)


class _RecordedFunction:
    """Function of a recipe, which notes its bytes and times.

    Args:
        recorder: Recorder of the function.
        function: Function that is called.
        inputs: Payloads, and other such functions.
    """

    def __init__(
        self,
        recorder: Recorder,
        function: Callable[..., Tensor],
        inputs: Sequence[int | _RecordedFunction],
    ) -> None:
        self._recorder, self._function, self._inputs = recorder, function, inputs
        self._stretch = Stretch((), 0, 0)

    def __call__(self, *args: Any) -> Tensor:
        result, self._stretch = self._recorder.apart(partial(self._function, *args))
        return result

    def again(self) -> Again:
        """Return the operator as it ran last."""
        inputs = [each if isinstance(each, int) else each._pruned() for each in self._inputs]
        return Again(*self._stretch, tuple(inputs))

    def _pruned(self) -> int | Again:
        """Return the operator; its input if it computes nothing."""
        again = self.again()
        is_view = len(again.inputs) == 1 and self._stretch == _NOTHING
        return again.inputs[0] if is_view else again


_NOTHING = Stretch((), 0, 0)


class Recorder(Observer):
    """Recorder of the events of a rank.

    Args:
        backend: Device of the rank.

    Attributes:
        memory: Memory that the backend has to use.
        chunk: Notes of the chunk that is at work.
        problem: Reason why tapes cannot describe the program; None without a reason.
    """

    def __init__(self, backend: VirtualBackend) -> None:
        self.memory = _WatchedMemory(self._allocated, self._freed, self._resized)
        self.chunk = ChunkNotes()
        self.problem: str | None = None
        self._raw: list[Raw] = []
        self._sources: dict[int, tuple[ChunkNotes, int]] = {}
        """Chunk and source of each storage, by number of the storage."""

        self._reloads: dict[int, Release] = {}
        """Event that ends each reload, by number of the reloaded storage."""

        self._of_recipes: set[int] = set()
        """Numbers of storages that recipes use, or whose bytes leave."""

        backend.compute.heard = (*backend.compute.heard, self._ran)

    def begin_chunk(self) -> ChunkNotes:
        """Begin the forward of a microbatch."""
        self.chunk = ChunkNotes()
        return self.chunk

    def taken(self) -> list[Raw]:
        """Return what happened since the last call.

        Raises:
            ValueError: Tapes cannot describe what happened.
        """
        if self.problem is not None:
            raise ValueError(f"{self.problem}; see what the program costs with run_pipeline")
        raw, self._raw = self._raw, []
        return raw

    def forget(self) -> None:
        """Forget all events and their storages, because a step begins."""
        self.taken()
        self._sources.clear()
        self._reloads.clear()
        self._of_recipes.clear()

    def _refuse(self, problem: str) -> None:
        """Have :meth:`taken` raise the problem: here the program's forward would raise it."""
        self.problem = self.problem or problem

    def told(self, raw: list[Raw]) -> tuple[Event, ...]:
        """Turn notes into events of sources and payloads, when all backwards are over."""
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
            is_counted = raw.number not in self._reloads and raw.number not in self._of_recipes
            nbytes = raw.nbytes if is_counted else 0
            return Stretch((), nbytes, nbytes)
        if isinstance(raw, _Freed):
            if raw.number in self._reloads:
                return self._reloads[raw.number]
            if raw.number in self._of_recipes:
                return _NOTHING
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
        has_left = group.state is GroupState.OFFLOADED
        if payloads is None or not has_left:
            self._raw.append(Close(position))
            return
        made = payloads.tensors
        gathered = {index: self._taken_out(made[index]) for index in payloads.gathered}
        self._note_copies(group)
        self._raw.append(Close(position))  # before the sources go: the payloads still hold them
        indices: list[int] = []
        recipes = payloads.chosen.recipes if payloads.chosen else []
        needed_for = {
            id(leaf): storage for recipe, _, storage in recipes for leaf in _leaves(recipe.term)
        }
        chunk.inputs.update(leaf for recipe, *_ in recipes for leaf in _leaves(recipe.term))
        for index in range(len(payloads.sizes)):
            tensor, members = payloads.tensors[index], payloads.members[index]
            storage = tensor.untyped_storage()
            if index in payloads.views:
                if any(id(saved) not in needed_for for saved in members):
                    self._refuse(
                        f"group '{group.name}' saves a view of shape "
                        f"{tuple(tensor.shape)} that is copied without the rest of "
                        "its storage, expected whole storages"
                    )
                    continue
                storage = needed_for[id(members[0])]
            indices.append(len(chunk.payloads))
            self._note(group.name, payloads.sizes[index], storage, members, gathered.get(index))
        for saved in payloads.chosen.reached if payloads.chosen else ():
            self._bring_anew(saved.batch)
        for _, members, storage in recipes:
            indices.append(len(chunk.payloads))
            nbytes = storage.nbytes()
            self._add(Payload(nbytes, self._source_of(group.name, nbytes, storage), 0), members)
            for saved in members:
                saved.restore = partial(self._computed, weakref.ref(saved), saved.restore)
        their = indices[len(indices) - len(recipes) :]
        for (recipe, *_), index in zip(recipes, their, strict=True):
            recipe.term, chunk.recipes[index] = self._with_recorded(recipe.term)
        chunk.groups[position] = GroupTape(group.name, tuple(indices))

    def _note_copies(self, group: Group) -> None:
        """Note the copies of parameters that were made for a group's recipes."""
        recipes = group.engine.recipes
        stretch = _NOTHING
        for _, copy in recipes.copies.values() if recipes else ():
            made = self._taken_out(copy.tensor)
            if made is not None:
                stretch = _together(stretch, made)
        assert group.key is not None
        if stretch.seconds:
            self.chunk.copies[group.key.position] = stretch

    def _taken_out(self, tensor: Tensor) -> Stretch | None:
        """Take out the notes of how a tensor was made; None if this forward did not make it."""
        number = self.memory.number_of(tensor.untyped_storage())
        for at, raw in enumerate(self._raw):
            if isinstance(raw, _Allocated) and raw.number == number:
                run = self._raw[at + 1]
                assert isinstance(run, _Run), "it was allocated for that"
                del self._raw[at : at + 2]
                self._of_recipes.add(number)
                return Stretch((run.seconds,), raw.nbytes, raw.nbytes)
        return None

    def _with_recorded(self, term: Call) -> tuple[Call, _RecordedFunction]:
        """Return the term with functions that are recorded, and the outermost function."""
        args: list[Any] = []
        inputs: list[int | _RecordedFunction] = []
        for arg in term.args:
            if type(arg) is Call:
                arg, function = self._with_recorded(arg)
                inputs.append(function)
            elif isinstance(arg, Saved):
                inputs.append(self._payload_of(arg))
            args.append(arg)
        function = _RecordedFunction(self, term.function, inputs)
        return Call(function, tuple(args)), function

    def _payload_of(self, saved: Saved) -> int:
        index = self.chunk.payload_of.get(saved)
        if index is None:
            index = self.chunk.payload_of_copy[weakref.ref(saved.batch), saved.index]
        return index

    def apart(self, function: Callable[[], Tensor]) -> tuple[Tensor, Stretch]:
        """Call a function of a recipe, and keep its events out of the notes."""
        begin = len(self._raw)
        result = function()
        raw = self._raw[begin:]
        del self._raw[begin:]
        stretch = _NOTHING
        for each in map(self._event, raw):
            assert isinstance(each, Stretch), "nothing is saved here"
            stretch = _together(stretch, each)
        self._of_recipes.update(each.number for each in raw if isinstance(each, _Allocated))
        return result, stretch

    def _note(
        self,
        name: str,
        nbytes: int,
        storage: UntypedStorage,
        members: Sequence[Saved],
        gathered: Stretch | None,
    ) -> None:
        """Note a payload that has left."""
        chunk, batch = self.chunk, members[0].batch
        source = self._source_of(name, nbytes, storage)
        copy = weakref.ref(batch), members[0].index
        chunk.payload_of_copy.setdefault(copy, len(chunk.payloads))
        version = chunk.version_of(source, *copy) if gathered is None else None
        gather_s = None if gathered is None else sum(gathered.seconds)
        self._add(Payload(nbytes, source, 0, version, None, gather_s), members)
        self._bring_anew(batch)

    @staticmethod
    def _bring_anew(batch: Batch) -> None:
        """Reload nothing ahead, and a payload anew for each use: each reload has memory of its own,
        which shows when backward lets go of it.
        """
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

    def _add(self, payload: Payload, members: Sequence[Saved]) -> None:
        """Add a payload, which is gone when neither autograd nor a recipe holds a member."""
        chunk, index = self.chunk, len(self.chunk.payloads)
        holders = [saved for saved in members if saved not in chunk.inputs]
        chunk.payload_of.update(dict.fromkeys(members, index))
        chunk.payloads.append(payload._replace(num_uses=len(holders)))
        living = len(holders)

        def gone() -> None:
            nonlocal living
            living -= 1
            if not living:
                self._raw.append(Gone(index))

        for holder in holders:
            weakref.finalize(holder, gone).atexit = False

    def used(self, saved: Saved, payload: Tensor) -> None:
        self._use(saved, payload)
        saved.batch.back.given[saved.index] = None

    def _computed(self, ref: weakref.ref[Saved], restore: Any, payload: Tensor) -> Tensor:
        """Note the use of a payload that a recipe has computed; see :meth:`used`."""
        saved = ref()
        assert saved is not None, "it is being unpacked"
        self._use(saved, payload)
        saved.recipe.given = None
        return payload if restore is None else restore(payload)

    def _use(self, holder: Any, tensor: Tensor) -> None:
        index, uses = self.chunk.payload_of.get(holder), self.chunk.uses
        if holder in self.chunk.inputs:  # by a recipe
            self._of_recipes.add(self.memory.number_of(tensor.untyped_storage()))
            return
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


def _together(stretch: Stretch, following: Stretch) -> Stretch:
    return Stretch(
        stretch.seconds + following.seconds,
        stretch.nbytes + following.nbytes,
        max(stretch.rise, stretch.nbytes + following.rise),
    )


def _leaves(term: Any) -> Iterator[Saved]:
    """Yield the saved tensors that a recipe asks for."""
    if isinstance(term, Saved):
        yield term
    elif type(term) is Call:
        for arg in term.args:
            yield from _leaves(arg)


class _Storage(weakref.ref[UntypedStorage]):
    __slots__ = ("nbytes", "number")
    number: int
    nbytes: int


class _WatchedMemory(DeviceMemory):
    """Memory that reports each storage when it is made and when it is gone.

    Args:
        allocated: Called with a new number, and the bytes of the storage.
        freed: Called with the same.
        resized: Called with the bytes before and after.
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
        """Number of a storage."""
        return self._numbered[storage._cdata].number

    def _seen(self, storage: UntypedStorage) -> Any:
        numbered = self._numbered.get(storage._cdata)
        if numbered is None or numbered() is not storage:
            numbered = _Storage(storage, self._tell)
            numbered.number, numbered.nbytes = self._num, rounded(storage.nbytes())
            self._num += 1
            self._numbered[storage._cdata] = numbered
            self._allocated(numbered.number, numbered.nbytes)
        elif numbered.nbytes != rounded(storage.nbytes()):
            self._resized(numbered.nbytes, storage.nbytes())
        return super()._seen(storage)

    def _tell(self, storage: _Storage) -> None:
        self._freed(storage.number, storage.nbytes)


def rounded(nbytes: int) -> int:
    """Bytes that a device allocator takes for ``nbytes``."""
    return -(-nbytes // ROUNDING_BYTES) * ROUNDING_BYTES
