"""The engine's core on numbers: it saves, sends and brings tensors that are only their bytes.

    engine = NumberEngine(device, places.tier(device, 0.0), record, config)
    chunk = NumberChunk(tape, key, NumberOffloader(engine, record, plan, split))
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
from typing import Any

from pp_offload._core.batch import Batch
from pp_offload._core.engine import Engine
from pp_offload._core.group import Group
from pp_offload._core.keys import ChunkKey
from pp_offload._core.payloads import Payloads
from pp_offload._core.saved import Saved
from pp_offload._core.shared import Copy, SharedCopies
from pp_offload._groups.chunk import Chunk
from pp_offload._groups.plan import Plan
from pp_offload._groups.split_backward import SplitBackward
from pp_offload.plan.device import Held, NumberDevice, NumberTensor
from pp_offload.plan.tape import Tape


class NumberSaved(Saved):
    """A saved tensor of a payload.

    Args:
        tensor: An alias of the source.
        group: Saves it.
        storage: Stands for the source in one version; None where no other group saves that.
    """

    __slots__ = ("storage",)

    def __init__(self, tensor: Any, group: Group, storage: Storage | None) -> None:
        super().__init__(tensor, group)
        self.storage = storage


class Storage:
    """A source in one version."""

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

    def __init__(self, device: Any, tier: Any, order: Any, config: Any) -> None:
        super().__init__(device, tier, order, config)
        self.shared = SharedNumbers()

    def payloads(self, group: Group) -> Payloads:
        """See :meth:`Engine.payloads`."""
        payloads = Payloads()
        members: list[Any] = [ref() for ref in group.saved_refs]
        for saved in members:
            if payloads.members and payloads.members[-1][0].index == saved.index:
                payloads.members[-1].append(saved)
                continue
            payloads.add(saved.tensor, [saved], saved.storage)
        group.counts.num_tensors = len(payloads.sizes)
        group.counts.nbytes = sum(payloads.sizes)
        return payloads

    def _warn(self, group: Group, failure: MemoryError) -> None:
        """That a group finds no room is what is asked."""


class NumberOffloader:
    """What chunks of a step share; what :class:`Chunk` asks of ``Offloader``."""

    is_enabled = True

    def __init__(self, engine: NumberEngine, step: Any, plan: Plan, split: SplitBackward) -> None:
        self.engine = engine
        self.step = step
        self.plan = plan
        self.lock = engine.mover.lock
        self.split = split


class NumberChunk(Chunk):
    """A microbatch of a stage.

    Args:
        tape: What it does.
        key: Which it is.
        device: Where it runs.
        offloader: Of the step.
    """

    def __init__(self, tape: Tape, key: ChunkKey, device: NumberDevice, offloader: Any) -> None:
        super().__init__(0, offloader, vp_stage=key.vp_stage, microbatch=key.microbatch)
        self.tape = tape
        self._compute = device.compute
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
        group.streams.append(self._compute)
        for index in self.tape.groups[position].payloads:
            self._save(group, index)
        self.open_groups.remove(group)
        self.close(group, None)

    def _save(self, group: Group, index: int) -> None:
        nbytes, _, source, num_uses, version = self.tape.payloads[index]
        storage = None
        if version is not None:
            storage = self._storages.setdefault((source, version), Storage())
        held = self._sources[source]
        assert held is not None, "it is dropped behind the commit"
        saved = self._saved[index] = [
            NumberSaved(NumberTensor(nbytes, held), group, storage) for _ in range(num_uses)
        ]
        for one in saved:
            one.index = index  # until a batch has it
        group.saved_refs += map(weakref.ref, saved)

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
