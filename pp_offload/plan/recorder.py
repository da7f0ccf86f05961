"""Recorder of a rank's work, for tapes.

recorder = Recorder(backend)             # before anything is allocated
recorder.chunk = ChunkNotes()            # before a forward
raw = recorder.taken()                   # after a forward
recorder.events_of(raw)                  # after all backwards
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, UntypedStorage

from pp_offload._core.batch import Batch
from pp_offload._core.cheap_operators import Call
from pp_offload._core.geometry import Geometry
from pp_offload._core.group import Group, GroupState
from pp_offload._core.observers import Observer
from pp_offload._core.payloads import Payloads
from pp_offload._core.recipes import computed
from pp_offload._core.saved import Saved
from pp_offload.plan.tape import Event, GroupTape, Mark, Payload, Stretch
from pp_offload.simulate.clocks import HostClock, Link
from pp_offload.simulate.device import DeviceMemory, VirtualBackend, rounded


class _Memory(NamedTuple):
    """A storage that was allocated, or freed."""

    number: int
    nbytes: int  # that a device allocator took; below 0 if it freed them


Raw = Event | _Memory


class ChunkNotes:
    """Notes of the chunk of a microbatch."""

    def __init__(self) -> None:
        self.raw: dict[str, list[Raw]] = {}  # notes of each action, by its kind
        self.sent_bytes = self.sent_back_bytes = 0
        self.groups: list[GroupTape] = []
        self.payloads: list[Payload] = []
        self.source_bytes: list[int] = []
        self.payload_of: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of saved tensors
        self.uses: Counter[int] = Counter()  # of each payload so far
        self.inputs: WeakSet[Any] = WeakSet()  # saved tensors that recipes hold
        # Events of each payload that is computed again, when it was computed last.
        self.recipes: dict[int, tuple[Event, ...]] = {}
        # Copy of each payload, back as a part, to memory in which it has its strides.
        self.scatters: dict[int, Stretch] = {}
        # First payload of each place in a batch.
        self.payload_of_copy: dict[tuple[weakref.ref[Batch], int], int] = {}

    def payloads_of_groups(self) -> tuple[Payload, ...]:
        """List all payloads, without the version of a source that only one group saves."""
        num = Counter(payload.source for payload in self.payloads)
        payloads = [
            each if num[each.source] > 1 else each._replace(version=None) for each in self.payloads
        ]
        for index, again in self.recipes.items():
            payloads[index] = payloads[index]._replace(again=again)
        for index, scatter in self.scatters.items():
            payloads[index] = payloads[index]._replace(scatter=scatter)
        return tuple(payloads)


class _ExactLink(Link):
    """Link that notes the times of compute's work. Differences of times of a clock are rounded, so
    that equal microbatches would have unequal tapes.
    """

    def __init__(self, host: HostClock, note: Callable[[float], None]) -> None:
        super().__init__(host)
        self._note = note

    def compute(self, begin_s: float, seconds: float) -> float:
        self._note(seconds)
        return super().compute(begin_s, seconds)


_NOTHING = Stretch((), 0, 0)


class Recorder(Observer):
    """Recorder of the events of a rank on a device, whose memory it replaces."""

    def __init__(self, backend: VirtualBackend) -> None:
        self.backend, self.chunk = backend, ChunkNotes()
        self.memory = backend.memory = DeviceMemory(note=self._note_memory)
        self._problem: str | None = None  # reason why tapes cannot describe the program
        self._raw: list[Raw] = []  # always the same list: finalizers append to it
        # By number of the storage: its chunk and source; the event at its end, if the engine's.
        self._sources: dict[int, tuple[ChunkNotes, int]] = {}
        self._ends: dict[int, Event] = {}
        self._gathered: dict[Saved, tuple[Tensor, Tensor]] = {}  # views of a group, and copies
        self._uses_by_recipe: Counter[int] = Counter()  # of each payload by the recipe that runs
        backend.link = _ExactLink(backend.host, self._ran)

    def taken(self) -> list[Raw]:
        """Return what happened since the last call; a ValueError if tapes cannot describe it."""
        if self._problem is not None:
            raise ValueError(f"{self._problem}; see what the program costs with run_pipeline")
        raw = self._raw.copy()
        self._raw.clear()
        return raw

    def forget(self) -> None:
        """Forget all events and their storages, because a step begins."""
        self.taken()
        self._sources.clear()
        self._ends.clear()

    def _refuse(self, problem: str) -> None:
        """Note the problem for :meth:`taken`: raised here, it would end the program's forward."""
        self._problem = self._problem or problem

    def events_of(self, raw: list[Raw]) -> tuple[Event, ...]:
        """Turn notes into events of sources and payloads, when all backwards are over."""
        events: list[Event] = []
        for event in map(self._event, raw):
            last = events[-1] if events else None
            if isinstance(event, Mark) and last == event._replace(kind="lose"):
                events[-1] = event
            elif isinstance(event, Stretch) and isinstance(last, Stretch):
                events[-1] = Stretch.joined((last, event))
            else:
                events.append(event)
        return tuple(events)

    def _event(self, raw: Raw) -> Event:
        if not isinstance(raw, _Memory):
            return raw
        number, nbytes = raw
        if number in self._ends:
            return self._ends[number] if nbytes < 0 else _NOTHING
        if number in self._sources and nbytes < 0:
            return Mark("drop", self._sources[number][1])
        return Stretch((), nbytes, max(0, nbytes))

    def _ran(self, seconds: float) -> None:
        self._raw.append(Stretch((seconds,), 0, 0))

    def _note_memory(self, number: int, nbytes: int) -> None:
        self._raw.append(_Memory(number, nbytes))

    def opened(self, group: Group) -> None:
        assert group.key is not None
        self._raw.append(Mark("begin", group.key.position))
        self.chunk.groups.append(GroupTape(group.name, ()))

    def gathered(self, saved: Saved, view: Tensor, copy: Tensor) -> None:
        self._gathered[saved] = view, copy

    def closed(self, group: Group, payloads: Payloads | None) -> None:
        if group.key is None:
            self._refuse(f"'{group.name}' leaves by itself, expected a group of a microbatch")
            return
        end = Mark("end", group.key.position)
        if payloads is None or group.state is not GroupState.OFFLOADED:
            self._raw.append(end)
            return
        chosen, gathered, self._gathered = payloads.chosen, self._gathered, {}
        recipes, reached = (chosen.recipes, chosen.reached) if chosen else ([], [])
        gathers = {saved: self._take_out(copy) for saved, (_, copy) in gathered.items()}
        made = [self._take_out(copy.tensor) for copy in chosen.copies.values()] if chosen else []
        copies = Stretch.joined(each for each in made if each is not None) if made else None
        self._raw.append(end)  # before sources are freed: the payloads still hold them
        first = len(self.chunk.payloads)
        self.chunk.inputs.update(leaf for recipe, *_ in recipes for leaf in _leaves(recipe.term))
        for index, nbytes in enumerate(payloads.sizes):
            tensor, members = payloads.tensors[index], payloads.members[index]
            view, _ = gathered.get(members[0], (tensor, tensor))
            gather = gathers.get(members[0])
            gather_s = None if gather is None else sum(gather.seconds)
            source = self._source_of(group.name, view.untyped_storage())
            self._note(Payload(nbytes, source, 0, gather_s=gather_s), members)
        for saved in reached:
            self._bring_anew(saved.batch)
        for recipe, members, storage in recipes:
            index = len(self.chunk.payloads)
            recipe.term = Call(partial(self._compute, self.chunk, index, recipe.term), ())
            self._add(Payload(storage.nbytes(), self._source_of(group.name, storage), 0), members)
            for saved in members:
                saved.restore = partial(self._computed, weakref.ref(saved), saved.restore)
        num = len(self.chunk.payloads)
        self.chunk.groups[end.number] = GroupTape(group.name, tuple(range(first, num)), copies)

    def _take_out(self, tensor: Tensor) -> Stretch | None:
        """Take out the notes of how a tensor was made; None if this forward did not make it."""
        number = self.memory.see(tensor.untyped_storage()).number
        for at, raw in enumerate(self._raw):
            if isinstance(raw, _Memory) and raw.number == number:
                run = self._raw[at + 1]
                assert isinstance(run, Stretch), "the tensor was allocated for that"
                del self._raw[at : at + 2]
                self._ends[number] = _NOTHING
                return Stretch(run.seconds, raw.nbytes, raw.nbytes)
        return None

    def _compute(self, chunk: ChunkNotes, index: int, term: Call) -> Tensor:
        """Compute a payload by its recipe, with notes of their own."""
        begin, outer_uses = len(self._raw), self._uses_by_recipe
        self._uses_by_recipe = Counter()
        output: Tensor = computed(term, lambda leaf: leaf.unpack())
        self._uses_by_recipe = outer_uses
        chunk.recipes[index] = self.events_of(self._raw[begin:])
        del self._raw[begin:]
        return output

    def _note(self, payload: Payload, members: Sequence[Saved]) -> None:
        """Note a payload that has left."""
        chunk, batch = self.chunk, members[0].batch
        copy = weakref.ref(batch), members[0].index
        first = chunk.payload_of_copy.setdefault(copy, len(chunk.payloads))
        if payload.gather_s is None:
            payload = payload._replace(version=first)
        self._add(payload, members)
        self._bring_anew(batch)

    @staticmethod
    def _bring_anew(batch: Batch) -> None:
        """Reload no payload ahead, and a payload anew for each use: each reload has memory of its
        own, whose end shows when backward releases it.
        """
        batch.back.uses[:] = [1] * len(batch.sizes)
        mover: Any = batch.mover
        mover.arrived.expect_uses(batch.back, [0] * len(batch.sizes))

    def _source_of(self, name: str, storage: UntypedStorage) -> int:
        chunk = self.chunk
        number = self.memory.see(storage).number
        saved_by, source = self._sources.setdefault(number, (chunk, len(chunk.source_bytes)))
        if saved_by is not chunk:
            self._refuse(
                f"group '{name}' saves {storage.nbytes()} bytes that another microbatch or stage "
                "saved as well, expected that each saves its own"
            )
        if source == len(chunk.source_bytes):
            chunk.source_bytes.append(rounded(storage.nbytes()))
        return source

    def _add(self, payload: Payload, members: Sequence[Saved]) -> None:
        """Add a payload, which ends when neither autograd nor a recipe holds a member."""
        chunk, index = self.chunk, len(self.chunk.payloads)
        holders = [saved for saved in members if saved not in chunk.inputs]
        chunk.payload_of.update(dict.fromkeys(members, index))
        chunk.payloads.append(payload._replace(num_uses=len(holders)))
        living = len(holders)

        def gone() -> None:
            nonlocal living
            living -= 1
            if not living:
                self._raw.append(Mark("gone", index))

        for holder in holders:
            weakref.finalize(holder, gone).atexit = False

    def used(self, saved: Saved, payload: Tensor) -> None:
        saved.batch.back.given[saved.index] = None
        restore: Any = saved.restore
        if getattr(restore, "__func__", None) is not Geometry.scattered:
            self._use(saved, payload)
            return

        def scattered(payload: Tensor) -> Tensor:
            saved.restore = restore
            view: Tensor = restore(payload)
            scatter = self._take_out(view)
            assert scatter is not None, "the view has memory of its own"
            self.chunk.scatters[self._payload_of(saved)] = scatter
            self._use(saved, view)
            return view

        self._ends[self.memory.see(payload.untyped_storage()).number] = _NOTHING
        saved.restore = scattered  # called next, by unpack()

    def _computed(self, ref: weakref.ref[Saved], restore: Any, payload: Tensor) -> Tensor:
        """Note the use of a payload that a recipe has computed; see :meth:`used`."""
        saved = ref()
        assert saved is not None, "it is being unpacked"
        self._use(saved, payload)
        saved.recipe.given = None
        return payload if restore is None else restore(payload)

    def _use(self, holder: Saved, tensor: Tensor) -> None:
        chunk, index = self.chunk, self._payload_of(holder)
        is_input = holder in chunk.inputs
        uses = self._uses_by_recipe if is_input else chunk.uses
        use = Mark("use", index, uses[index])
        uses[index] += 1
        self._raw.append(use)
        number = self.memory.see(tensor.untyped_storage()).number
        self._ends[number] = use._replace(kind="release")
        if not is_input:
            weakref.finalize(tensor, self._raw.append, use._replace(kind="lose")).atexit = False

    def _payload_of(self, holder: Saved) -> int:
        index = self.chunk.payload_of.get(holder)
        if index is None:  # a recipe needs what another group has sent
            index = self.chunk.payload_of_copy[weakref.ref(holder.batch), holder.index]
        return index


def _leaves(term: Any) -> Iterator[Saved]:
    """Yield the saved tensors that a recipe needs."""
    if isinstance(term, Saved):
        yield term
    elif type(term) is Call:
        for arg in term.args:
            yield from _leaves(arg)
