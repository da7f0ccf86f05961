"""The engine's core in numbers: it saves, offloads and reloads tensors that are only sizes.

    device.play(stretch)   # compute runs operators, on the clocks of a virtual device
    chunk.begin(0)
    chunk.end(0)           # the payloads of the group leave, or stay
    chunk.use(0)           # backward asks for a payload
    chunk.release(0, 0)    # backward freed the payload

The core decides which payloads leave, which streams wait and when payloads are reloaded; only bytes
and times are moved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import UntypedStorage

from pp_offload._core.batch import Batch
from pp_offload._core.cheap_operators import Call
from pp_offload._core.engine import Engine
from pp_offload._core.group import Group
from pp_offload._core.payloads import Payloads
from pp_offload._core.recipes import Chosen, Recipe
from pp_offload._core.saved import Saved
from pp_offload._core.shared import Copy, SharedCopies, microbatch_of
from pp_offload._groups.chunk import Chunk
from pp_offload._groups.manager import Manager
from pp_offload._groups.offloader import Offloader
from pp_offload.config import OffloadConfig
from pp_offload.plan.tape import Event, Mark, Stretch, Tape
from pp_offload.simulate.device import VirtualBackend, rounded
from pp_offload.simulate.hardware import Hardware


class Bytes:
    """Counter of the bytes in use, and of their peak, in place of :class:`DeviceMemory`."""

    def __init__(self, taken_bytes: int = 0) -> None:
        self.live_bytes = self.peak_bytes = taken_bytes

    def take_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def pass_by(self, nbytes: int, rise: int) -> None:
        """Count ``nbytes`` more in the end, and at most ``rise`` more on the way."""
        live = self.live_bytes
        if live + rise > self.peak_bytes:
            self.peak_bytes = live + rise
        self.live_bytes = live + nbytes

    def tensor(self, nbytes: int) -> NumberTensor:
        taken = rounded(nbytes)
        self.pass_by(taken, taken)
        return NumberTensor(nbytes, Held(self, taken))


@dataclass(slots=True, eq=False)
class Held:
    """Device memory, already counted, which is freed with the last reference to this object."""

    memory: Bytes
    nbytes: int

    def __del__(self) -> None:
        self.memory.live_bytes -= self.nbytes


class NumberTensor:
    """A tensor on the device, as the core reads it. ``contiguous`` copies a part of a source."""

    __slots__ = ("__weakref__", "contiguous", "held", "nbytes")

    _base = None
    _version = 0
    dtype = None
    shape = ()

    def __init__(
        self, nbytes: int, held: Held, contiguous: Callable[[], NumberTensor] | None = None
    ) -> None:
        self.nbytes, self.held, self.contiguous = nbytes, held, contiguous

    def detach(self) -> NumberTensor:
        return self

    def data_ptr(self) -> int:
        return 0  # no storage is ever emptied

    def is_contiguous(self) -> bool:
        return True

    def _fix_weakref(self) -> None:
        """Do nothing: only Python refers to the tensor."""


@dataclass(slots=True, eq=False)
class HostNumbers:
    """Host memory of the host pool; ``torch.empty_like`` allocates device memory of its size."""

    device: NumberDevice
    nbytes: int

    def numel(self) -> int:
        return self.nbytes

    def narrow(self, dim: int, start: int, length: int) -> HostNumbers:
        return HostNumbers(self.device, length)

    def view(self, what: object) -> HostNumbers:
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> NumberTensor:
        """Run ``torch.empty_like``, the only function that the core calls with host memory."""
        (host,) = args
        return host.device.memory.tensor(host.nbytes)


class NumberDevice(VirtualBackend):
    """Virtual device for tensors that are only their bytes."""

    # A new Bytes for each step: tensors of earlier steps are counted in the earlier one.
    memory: Any

    def __init__(self, hardware: Hardware) -> None:
        super().__init__(hardware)
        self.memory = Bytes()

    def allocate_host(self, nbytes: int) -> Any:
        self.pin(nbytes)
        return HostNumbers(self, nbytes)

    def play(self, stretch: Stretch) -> None:
        """Launch operators, which take their times if no copy slows them down; count memory."""
        for took_s in stretch.seconds:
            self.compute.launch_until(partial(self.link.compute, seconds=took_s))
        self.memory.pass_by(stretch.nbytes, stretch.rise)

    def gather(self, nbytes: int, seconds: float) -> NumberTensor:
        """Copy a part of a tensor into memory of its own."""
        self.play(Stretch((seconds,), 0, 0))
        return self.memory.tensor(nbytes)

    def scatter(self, scatter: Stretch, payload: object) -> Any:
        """Copy a part that is back into memory in which it has its strides."""
        self.play(scatter)
        return NumberTensor(scatter.nbytes, Held(self.memory, scatter.nbytes))


class SharedNumbers(SharedCopies):
    """Shared copies by storages of a tape, each of which may be saved again."""

    def add(self, payloads: Payloads, batch: Batch) -> None:
        for index, storage in enumerate(payloads.storages):
            if storage is not None:
                members = payloads.members[index]
                refs = weakref.ref(storage), weakref.ref(members[0])
                copy = Copy(*refs, (), weakref.ref(batch), index, microbatch_of(members[0].group))
                self.copies[storage._cdata] = copy


class NumberEngine(Engine):
    """Engine that gets the payloads of a group from its chunk, in place of saved tensors."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shared = SharedNumbers()
        self.recipes = None  # tapes contain the recipes
        self.collected = Payloads()  # of the group that is closed next

    def _collected(self, group: Group) -> Payloads:
        payloads, self.collected = self.collected, Payloads()
        return payloads

    def _warn(self, group: Group, failure: MemoryError) -> None:
        """Log nothing: a prediction asks whether a group finds room."""


class NumberOffloader(Offloader):
    """Offloader whose engine works on numbers."""

    engine_type = NumberEngine


class NumberManager(Manager):
    """Manager of a rank in numbers, which learns from steps like other managers."""

    offloader_type = NumberOffloader

    def __init__(self, config: OffloadConfig, device: NumberDevice) -> None:
        super().__init__(config=config, backend=device)
        self.idle_groups.num_steps_left = 0  # predictions do not warn of idle groups

    def _log_gain(self) -> None:
        """Log nothing: a prediction returns the costs."""


class NumberChunk(Chunk):
    """Microbatch of a stage, with a method for each kind of :class:`Mark`."""

    def __init__(self, tape: Tape, min_numel: int, offloader: Any, **which: Any) -> None:
        super().__init__(min_numel, offloader, **which)
        self.tape = tape
        self._device = device = offloader.backend
        self._engine: NumberEngine = offloader.engine
        self._sources: list[Held | None] = [Held(device.memory, n) for n in tape.source_bytes]
        # Versions of sources, whose copies groups share.
        self._storages: dict[tuple[int, int], UntypedStorage] = {}
        self._saved: dict[int, list[Saved]] = {}
        self._given: dict[tuple[int, int], Any] = {}

    def begin(self, position: int, use: int = 0) -> None:
        self.start(self.tape.groups[position].name)

    def end(self, position: int, use: int = 0) -> None:
        group, engine = self.groups[position], self._engine
        group.streams.append(self._device.compute)
        for index in self.tape.groups[position].payloads:
            num_uses = self.tape.payloads[index].num_uses
            self._saved[index] = [Saved(self._tensor(index), group) for _ in range(num_uses)]
            if (scatter := self.tape.payloads[index].scatter) is not None:
                for saved in self._saved[index]:
                    saved.restore = partial(self._device.scatter, scatter)
            group.saved_refs += map(weakref.ref, self._saved[index])
        self.open_groups.remove(group)
        if group.saved_refs:
            engine.collected = self._payloads(position, group)
        self.close(group, None)

    def drop(self, source: int, use: int = 0) -> None:
        self._sources[source] = None

    def use(self, index: int, use: int = 0) -> None:
        members = self._saved[index]
        self._given[index, use] = members[use % len(members)].unpack()

    def lose(self, index: int, use: int) -> None:
        self._given[index, use] = self._given[index, use].held

    def release(self, index: int, use: int) -> None:
        del self._given[index, use]

    def gone(self, index: int, use: int = 0) -> None:
        del self._saved[index]

    def _tensor(self, index: int) -> Any:
        """Make the source of a payload, or a part that compute copies out of the source."""
        payload = self.tape.payloads[index]
        held = self._sources[payload.source]
        assert held is not None, "a source is dropped only after the commit"
        if payload.gather_s is None:
            return NumberTensor(payload.nbytes, held)
        gather = partial(self._device.gather, payload.nbytes, payload.gather_s)
        return NumberTensor(payload.nbytes, held, gather)

    def _payloads(self, position: int, group: Group) -> Payloads:
        """Return the payloads that a group may send at its commit; see :meth:`Engine.payloads`."""
        members = {index: [*self._saved[index]] for index in self.tape.groups[position].payloads}
        reached: list[Saved] = []
        terms: dict[int, Call] = {}
        for index in members:
            if (again := self.tape.payloads[index].again) is None:
                continue
            asked = [each.number for each in again if isinstance(each, Mark) and each.kind == "use"]
            leaves = [self._leaf(number, group, members, reached) for number in asked]
            terms[index] = Call(partial(_computed, self._device, again, leaves), ())
        payloads, mover = Payloads(), self._engine.mover
        recipes: list[Any] = []
        for index, each in members.items():
            payload = self.tape.payloads[index]
            if index in terms:
                recipe = Recipe(terms[index], mover, len(each), group.name)
                recipes.append((recipe, each, UntypedStorage(payload.nbytes, device="meta")))
                continue
            storage = None
            if payload.version is not None:
                key = payload.source, payload.version
                storage = UntypedStorage(payload.nbytes, device="meta")
                storage = self._storages.setdefault(key, storage)
            if payload.gather_s is not None:
                payloads.views.append(len(payloads.sizes))
            payloads.add(each[0].here, each, storage)
        if recipes:
            copy = partial(self._copy_parameters, position, recipes)
            payloads.chosen = Chosen(recipes, reached, copy, {})
        return payloads

    def _copy_parameters(self, position: int, recipes: list[Any]) -> None:
        copies = self.tape.groups[position].copies
        if copies is not None:
            self._device.play(copies)
            copied = Held(self._device.memory, copies.nbytes)
            for recipe, *_ in recipes:
                recipe.term = recipe.term._replace(args=(copied,))

    def _leaf(
        self, index: int, group: Group, members: dict[int, list[Saved]], reached: list[Saved]
    ) -> Saved:
        """Make an input of a recipe: a member of its payload, or else in ``reached`` if it left."""
        if index in members:
            own = members[index]  # empty for a part that only recipes use
            own.append(own[0].twin(group) if own else Saved(self._tensor(index), group))
            return own[-1]
        member = self._saved[index][0]
        twin = member.twin(group)
        if twin.tensor is None:
            twin.batch, twin.index = member.batch, member.index
            reached.append(twin)
        return twin


def _computed(
    device: NumberDevice, again: Sequence[Event], leaves: Sequence[Saved], *_: Held
) -> Any:
    """Compute a payload again. Its output owns the memory that is in use at the end."""
    given: dict[tuple[int, int], Any] = {}
    asked, nbytes = iter(leaves), 0
    for event in again:
        if isinstance(event, Stretch):
            device.play(event)
            nbytes += event.nbytes
        elif event.kind == "use":
            given[event.number, event.use] = next(asked).unpack()
        else:
            del given[event.number, event.use]
    return NumberTensor(nbytes, Held(device.memory, nbytes))
