"""The engine's core on numbers: saves, offloads and reloads tensors that are only their bytes.

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
    """Saved tensor of a payload.

    Args:
        tensor: An alias of the source.
        group: Group that saves the tensor.
        chunk: Chunk of the group.
    """

    __slots__ = ("chunk",)

    def __init__(self, tensor: Any, group: Group, chunk: NumberChunk) -> None:
        super().__init__(tensor, group)
        self.chunk = chunk


class Storage:
    """Version of a source.

    Args:
        nbytes: Size of the source.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def nbytes(self) -> int:
        """Bytes of the storage."""
        return self._nbytes

    @property
    def _cdata(self) -> int:
        return id(self)


class SharedNumbers(SharedCopies):
    """Shared copies, by the storages of a tape."""

    def add(self, payloads: Payloads, batch: Batch) -> None:
        """Add the copies of a batch; see :meth:`SharedCopies.add`."""
        for index, storage in enumerate(payloads.storages):
            if storage is not None:
                first = weakref.ref(payloads.members[index][0])
                copy = Copy(weakref.ref(storage), first, (), weakref.ref(batch), index)
                self.copies[storage._cdata] = copy


class NumberEngine(Engine):
    """Engine that reads tapes in place of tensors and storages."""

    shared: SharedNumbers

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shared = SharedNumbers()
        self.recipes = None  # tapes have them
        self.copied: set[Place] = set()
        """Places of groups whose copies of parameters were made."""

    def begin_step(self) -> None:
        """Begin a step, in which copies of parameters are made anew."""
        super().begin_step()
        self.copied.clear()

    def _collected(self, group: Group) -> Payloads:
        first: Any = group.saved_refs[0]() if group.saved_refs else None
        return Payloads() if first is None else first.chunk.payloads(group)

    def _warn(self, group: Group, failure: MemoryError) -> None:
        """Log nothing: a prediction asks whether a group finds room."""


class NumberOffloader(Offloader):
    """Offloader whose engine works on numbers."""

    def _fresh_engine(self) -> NumberEngine:
        tier = make_tier(self.backend, self.config, self._allocate)
        return NumberEngine(self.backend, tier, self.step, self.config, self.observers)


class PlannedBounds(AutoBounds):
    """Bounds of a plan. No step is timed, because nothing is chosen from its times."""

    def begin_step(self) -> None:
        """Time no step; see :class:`AutoBounds`."""


class NumberManager(Manager):
    """Manager of a rank in numbers, which learns from steps as any other manager.

    Args:
        config: Options.
        device: Device of the rank.
        has_bounds: Whether the plan of the rank has bounds.
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
        """Log nothing: a prediction returns the costs."""


class NumberChunk(Chunk):
    """Microbatch of a stage.

    Args:
        tape: Events of the microbatch.
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
        """Start a group."""
        self.start(self.tape.groups[position].name)

    def close_group(self, position: int) -> None:
        """Commit a group."""
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
        """Make the source of a payload, or a part of the source."""
        payload = self.tape.payloads[index]
        held = self._sources[payload.source]
        assert held is not None, "it is dropped behind the commit"
        if payload.gather_s is None:
            return NumberTensor(payload.nbytes, held)
        return NumberPart(payload.nbytes, held, self._device, payload.gather_s)

    def payloads(self, group: Group) -> Payloads:
        """Return what a group being committed may send; see :meth:`Engine.payloads`."""
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
        """Make the call that computes a payload again.

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
        """Drop the program's reference to a source."""
        self._sources[source] = None

    def use(self, index: int) -> None:
        """Give a payload to backward."""
        number, members = self._uses[index], self._saved[index]
        self._uses[index] = number + 1
        self._given[index, number] = members[number % len(members)].unpack()

    def lose(self, index: int, use: int) -> None:
        """Keep only the memory of a use: backward has a view of it, and not the tensor."""
        self._given[index, use] = self._given[index, use].held

    def release(self, index: int, use: int) -> None:
        """Drop backward's reference to the tensor of a use."""
        del self._given[index, use]

    def gone(self, index: int) -> None:
        """Drop autograd's references to a payload, which is not used again."""
        del self._saved[index]


def _leaves(again: Again) -> Iterator[int]:
    """Yield the payloads that the operator asks for, in order."""
    for each in again.inputs:
        if isinstance(each, int):
            yield each
        else:
            yield from _leaves(each)


def _made(device: NumberDevice, again: Again, leaves: list[Saved]) -> Any:
    """Run operators on saved tensors, and return the output."""
    return _made_of(device, again, iter(leaves))


def _made_of(device: NumberDevice, again: Again, leaves: Iterator[Saved]) -> NumberTensor:
    inputs = [  # noqa: F841 -- alive until it returns
        next(leaves).unpack() if isinstance(each, int) else _made_of(device, each, leaves)
        for each in again.inputs
    ]
    device.run(again.seconds)
    device.memory.pass_by(again.nbytes, again.rise)
    return NumberTensor(again.nbytes, Held(device.memory, again.nbytes))
