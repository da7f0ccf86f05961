"""The engine's core on numbers: it saves, sends and brings tensors that are only their bytes.

    manager = NumberManager(config, NumberDevice(hardware))
    manager.begin_chunk(1, 0, make=partial(NumberChunk, tape))
    chunk = manager.forward.chunk
    chunk.open(0)
    chunk.close_group(0)   # its payloads leave, or stay
    chunk.use(0)           # backward asks for a payload
    chunk.release(0, 0)    # and has let go of it

What leaves, what waits for what and what comes back when, the core decides; only bytes and times
are moved.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

from pp_offload._core.batch import Batch
from pp_offload._core.engine import Engine
from pp_offload._core.group import Group
from pp_offload._core.keys import GroupKey, Place
from pp_offload._core.operators import Call
from pp_offload._core.payloads import Payloads
from pp_offload._core.recipes import Chosen, Recipe
from pp_offload._core.saved import Saved
from pp_offload._core.shared import Copy, SharedCopies
from pp_offload._core.tiers import make_tier
from pp_offload._groups.auto_bounds import AutoBounds
from pp_offload._groups.chunk import Chunk
from pp_offload._groups.manager import Manager
from pp_offload._groups.offloader import Offloader
from pp_offload._groups.step import StepRecord
from pp_offload.config import OffloadConfig
from pp_offload.plan.device import Held, NumberDevice, NumberPart, NumberTensor
from pp_offload.plan.tape import Again, Tape


class NumberSaved(Saved):
    """A saved tensor of a payload.

    Args:
        tensor: An alias of the source.
        group: Saves it.
        chunk: Of the group.
    """

    __slots__ = ("chunk",)

    def __init__(self, tensor: Any, group: Group, chunk: NumberChunk) -> None:
        super().__init__(tensor, group)
        self.chunk = chunk


class Storage:
    """A source in one version.

    Args:
        nbytes: Of it.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def nbytes(self) -> int:
        """As of a storage."""
        return self._nbytes

    @property
    def _cdata(self) -> int:
        return id(self)


class SharedNumbers(SharedCopies):
    """Knows storages by what the tape says of them."""

    def add(self, payloads: Payloads, batch: Batch) -> None:
        """See :meth:`SharedCopies.add`."""
        for index, storage in enumerate(payloads.storages):
            if storage is not None:
                first = weakref.ref(payloads.members[index][0])
                copy = Copy(weakref.ref(storage), first, (), weakref.ref(batch), index)
                self.copies[storage._cdata] = copy


class NumberEngine(Engine):
    """The core's, but for what it would read of tensors and storages."""

    shared: SharedNumbers

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shared = SharedNumbers()
        self.recipes = None  # tapes have them
        self.copied: set[Place] = set()
        """Places of groups whose copies of parameters were made."""

    def begin_step(self) -> None:
        """Copies of parameters are made anew."""
        super().begin_step()
        self.copied.clear()

    def _collected(self, group: Group) -> Payloads:
        first: Any = group.saved_refs[0]() if group.saved_refs else None
        return Payloads() if first is None else first.chunk.payloads(group)

    def _warn(self, group: Group, failure: MemoryError) -> None:
        """That a group finds no room is what is asked."""


class NumberOffloader(Offloader):
    """Its engine works on numbers."""

    def _fresh_engine(self) -> NumberEngine:
        tier = make_tier(self.backend, self.config, self._allocate)
        return NumberEngine(self.backend, tier, self.step, self.config, self.observers)


class PlannedBounds(AutoBounds):
    """Those of a plan: no step is timed, for nothing is chosen from its times."""

    def begin_step(self) -> None:
        """See :class:`AutoBounds`."""


class NumberManager(Manager):
    """A manager of a rank in numbers: it learns from steps as any other.

    Args:
        config: Options.
        device: Where it works.
        has_bounds: Whether its plan has bounds.
    """

    def __init__(
        self, config: OffloadConfig, device: NumberDevice, *, has_bounds: bool = False
    ) -> None:
        super().__init__(config=config, backend=device)
        step = StepRecord()
        self._follow(config, step, NumberOffloader(device, config, step))
        if has_bounds:
            self.bounds = PlannedBounds(self.offloader, config, self._room.unused_bytes)
        self.num_attached = 1
        self.idle_groups.num_steps_left = 0  # whether groups do something is not asked here

    def _say_what_steps_cost(self) -> None:
        """That is for who predicts."""


class NumberChunk(Chunk):
    """A microbatch of a stage.

    Args:
        tape: What it does.
        min_numel, offloader, which: As for :class:`Chunk`.
    """

    def __init__(self, tape: Tape, min_numel: int, offloader: Any, **which: Any) -> None:
        super().__init__(min_numel, offloader, **which)
        self.tape = tape
        self._device = device = offloader.backend
        self._sources: list[Held | None] = [
            Held(device.memory, nbytes) for nbytes in tape.source_bytes
        ]
        self._storages: dict[tuple[int, int], Storage] = {}
        self._saved: dict[int, list[NumberSaved]] = {}
        self._uses = Counter[int]()
        self._given: dict[tuple[int, int], Any] = {}

    def open(self, position: int) -> None:
        """A group starts."""
        self.start(self.tape.groups[position].name)

    def close_group(self, position: int) -> None:
        """A group is committed."""
        group = self.groups[position]
        group.streams.append(self._device.compute)
        for index in self.tape.groups[position].payloads:
            self._save(group, index)
        self.open_groups.remove(group)
        self.close(group, None)

    def _save(self, group: Group, index: int) -> None:
        num_uses = self.tape.payloads[index].num_uses
        saved = [NumberSaved(self._tensor(index), group, self) for _ in range(num_uses)]
        self._saved[index] = saved
        group.saved_refs += map(weakref.ref, saved)

    def _tensor(self, index: int) -> NumberTensor:
        """The source of a payload, or a part of it."""
        payload = self.tape.payloads[index]
        held = self._sources[payload.source]
        assert held is not None, "it is dropped behind the commit"
        if payload.gather_s is None:
            return NumberTensor(payload.nbytes, held)
        return NumberPart(payload.nbytes, held, self._device, payload.gather_s)

    def payloads(self, group: Group) -> Payloads:
        """What a group being committed may send; see :meth:`Engine.payloads`."""
        assert group.key is not None
        members = {
            index: list[Saved](self._saved[index])
            for index in self.tape.groups[group.key.position].payloads
        }
        reached: list[Saved] = []
        terms = {
            index: self._term(again, group, members, reached)
            for index in members
            if (again := self.tape.payloads[index].again) is not None
        }
        payloads, mover = Payloads(), self.offloader.engine.mover
        recipes: list[Any] = []
        for index, each in members.items():
            payload = self.tape.payloads[index]
            if index in terms:
                recipe = Recipe(terms[index], mover, len(each), group.name)
                recipes.append((recipe, each, Storage(payload.nbytes)))
                continue
            storage: Any = None
            if payload.version is not None:
                key = payload.source, payload.version
                storage = self._storages.setdefault(key, Storage(payload.nbytes))
            if payload.gather_s is not None:
                payloads.views.append(len(payloads.sizes))
            payloads.add(each[0].here, each, storage)
        if recipes:
            payloads.chosen = Chosen(recipes, reached, partial(self._copy_parameters, group.key))
        return payloads

    def _copy_parameters(self, key: GroupKey) -> None:
        made: Any = self.offloader.engine.copied  # type: ignore[attr-defined]
        copies = self.tape.groups[key.position].copies
        if copies is not None and key.place not in made:
            made.add(key.place)
            self._device.run(copies.seconds)
            self._device.memory.add(copies.nbytes)

    def _term(
        self, again: Again, group: Group, members: dict[int, list[Saved]], reached: list[Saved]
    ) -> Call:
        """How a payload is computed again.

        Args:
            again: What it says.
            group: Which has saved it.
            members: Its saved tensors by payload, which those that the recipe holds join.
            reached: Those of them that left with other groups.
        """
        leaves: list[Saved] = []
        for index in _leaves(again):
            if index in members and not members[index]:  # a part that nobody else asks for
                twin: Saved = NumberSaved(self._tensor(index), group, self)
            else:
                twin = (members[index] if index in members else self._saved[index])[0].twin(group)
            if index in members:
                members[index].append(twin)
            elif twin.tensor is None:
                member = self._saved[index][0]
                twin.batch, twin.index = member.batch, member.index
                reached.append(twin)
            leaves.append(twin)
        return Call(partial(_made, self._device, again, leaves), ())

    def drop(self, source: int) -> None:
        """The program has let go of a source."""
        self._sources[source] = None

    def use(self, index: int) -> None:
        """Backward asks for a payload."""
        number, members = self._uses[index], self._saved[index]
        self._uses[index] = number + 1
        self._given[index, number] = members[number % len(members)].unpack()

    def lose(self, index: int, use: int) -> None:
        """Backward has a view of what it was given for a use, and not that itself."""
        self._given[index, use] = self._given[index, use].held

    def release(self, index: int, use: int) -> None:
        """Backward has let go of what it was given for a use."""
        del self._given[index, use]

    def gone(self, index: int) -> None:
        """Autograd will not ask for it any more."""
        del self._saved[index]


def _leaves(again: Again) -> Iterator[int]:
    """Payloads that it asks for, in order."""
    for each in again.inputs:
        if isinstance(each, int):
            yield each
        else:
            yield from _leaves(each)


def _made(device: NumberDevice, again: Again, leaves: list[Saved]) -> Any:
    """What operators make of saved tensors."""
    return _made_of(device, again, iter(leaves))


def _made_of(device: NumberDevice, again: Again, leaves: Iterator[Saved]) -> NumberTensor:
    inputs = [  # noqa: F841 -- alive until it returns
        next(leaves).unpack() if isinstance(each, int) else _made_of(device, each, leaves)
        for each in again.inputs
    ]
    device.run(again.seconds)
    device.memory.pass_by(again.nbytes, again.rise)
    return NumberTensor(again.nbytes, Held(device.memory, again.nbytes))
