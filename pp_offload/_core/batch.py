"""A batch: the payloads of one group off the device, in one host place, behind one event.

    leaving      ``leaving`` keeps the device memory until the copy to the host has run
    away         only ``place`` has the bytes; on disk alone, ``write``, until a thread reads them
    coming back  ``back.device[i]`` is memory for payload i, ``back.reloads[i]`` has its event
    used up      ``back.device[i]`` is None; ``back.given[i]`` refers weakly to autograd's tensor

Autograd owns a batch through its saved tensors, and its memory is free when the last of them is
freed. Autograd frees nodes in C++, where an exception from Python code is lost. So the callbacks
of weak references are C functions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from pp_offload.backends import Event, Stream

_address = methodcaller("data_ptr")

Spec = tuple[torch.Size, torch.dtype]  # shape and dtype of a payload


@dataclass(slots=True, eq=False)
class Reload:
    """A reload of payloads, by a copy or taken back, for one compute stream."""

    stream: Stream  # on which their memory was allocated; only this one may use it
    event: Event | None = None  # behind the copy; None if taken back, or if queueing raised
    is_there: bool = False  # whether ``stream`` has waited for ``event``, or need not


class Leaving:
    """The sources of a copy to the host, kept until it has run."""

    __slots__ = "addresses batch nbytes offloaded sources stream then watched".split()

    def __init__(self, batch: Batch, payloads: Any, stream: Stream) -> None:
        self.batch = weakref.ref(batch)  # which autograd frees, with an event for the next owner
        self.offloaded, self.stream = batch.offloaded, stream
        self.sources: Sequence[Tensor] = payloads.tensors
        self.nbytes = sum(payloads.sizes)
        self.then: list[Callable[[], None]] = []  # to be called when the sources were let go
        # An owner may empty a storage and refill it elsewhere.
        self.addresses = list(map(_address, self.sources))
        # Tensors that share memory with the sources, so that a change of one changes a source; each
        # with its version when it was saved, and its payload's index.
        self.watched: list[tuple[Tensor, int, int]] = [
            (member.tensor, member.version, index)
            for index, members in enumerate(payloads.members)
            if index not in payloads.gathered  # its source is a copy, hidden from the program
            for member in members
        ]

    def changed(self) -> frozenset[int]:
        """Return payloads whose source was changed after it was saved."""
        changed = {index for tensor, version, index in self.watched if tensor._version != version}
        addresses = list(map(_address, self.sources))  # loops in C: thousands may leave
        if addresses != self.addresses:
            pairs = enumerate(zip(addresses, self.addresses, strict=True))
            changed.update(index for index, (now, before) in pairs if now != before)
        return frozenset(changed)


class Batch:
    """The payloads of one group off the device."""

    __slots__ = (
        "__weakref__ back changed label later leaving mover offloaded passage place reading sizes "
        "specs write".split()
    )

    place: Any  # host memory with the bytes; None once only the disk has them
    passage: Any  # owner of ``place``, if the bytes only pass through it to the disk
    write: Any  # the write to the disk, which owns the bytes there; None without one
    # End of the read back to host memory; None before it is queued, after it failed, and once the
    # payloads are on the device.
    reading: Event | None
    offloaded: Event  # behind the copy to the host
    leaving: Leaving | None  # sources of that copy; None once it has run
    changed: frozenset[int]  # payloads that were changed in place before their copy had run
    # Remaining uses of each payload that several groups use, by user: ``id`` of a group that
    # backward has not reached; None for its own group; ``id`` of the SplitBackward for the second
    # part of a backward. Decides what stays; no tensor depends on it.
    later: dict[int, dict[int | None, int]]

    def __init__(
        self, mover: Any, label: str, sizes: list[int], specs: list[Spec], uses: list[int]
    ) -> None:
        self.mover, self.label, self.sizes, self.specs = mover, label, sizes, specs
        self.passage = self.write = self.reading = self.leaving = None
        self.changed, self.later = frozenset(), {}
        self.back = Back(self, uses)

    def use_again(self, index: int, num: int, group: int) -> None:
        """Add ``num`` uses of a payload, by saved tensors of the group with this ``id``."""
        back = self.back
        uses = self.later.setdefault(index, {None: back.uses_left[index]})
        uses[group] = uses.get(group, 0) + num  # shared, and needed by a recipe, too
        back.uses[index] += num
        if back.uses_left[index] == 0 and back.device[index] is None:
            back.num_away += 1  # it was used up, and will be used again
        back.uses_left[index] += num


class Back(weakref.ref[Batch]):
    """The payloads of a batch on the device, by index. It outlives the batch: memory that a copy
    still writes is kept until the copy has run.
    """

    __slots__ = "checksums device given num_away part reloads sizes uses uses_left versions".split()

    device: list[Tensor | None]  # memory; None before the reload, and when it is used up
    reloads: list[Reload | None]  # the Reload that brought each payload
    given: list[weakref.ref[Tensor] | None]  # what autograd got when a payload left ``device``
    versions: list[int]  # version of the memory when it was last given out; -1 before
    uses: list[int]  # in all; counted anew if a payload comes back after the last
    uses_left: list[int]  # 0 when a payload is used up
    # Number of payloads with remaining uses, in any part of backward, that are neither on the
    # device nor on the way.
    num_away: int
    # Payloads that the first part of a split backward has still to use; all others are for the
    # second part. None if backward is not split, or its first part is over.
    part: frozenset[int] | None
    checksums: Sequence[int]  # of each payload when it left, with ``verify``

    __eq__ = object.__eq__  # equal weak references to one object would be one element of a set
    __hash__ = object.__hash__

    def __new__(cls, batch: Batch, uses: list[int]) -> Back:
        return super().__new__(cls, batch, batch.mover.arrived.gone.append)

    def __init__(self, batch: Batch, uses: list[int]) -> None:
        num = self.num_away = len(batch.sizes)
        self.device, self.reloads, self.given = [None] * num, [None] * num, [None] * num
        self.versions, self.uses, self.uses_left = [-1] * num, uses, uses.copy()
        self.part, self.sizes, self.checksums = None, batch.sizes, ()

    def away(self) -> list[int]:
        """Return payloads, neither here nor on the way, that this part of backward will use."""
        uses_left, part = self.uses_left, self.part
        away = [i for i, tensor in enumerate(self.device) if tensor is None and uses_left[i] > 0]
        return away if part is None else [i for i in away if i in part]

    def put(self, index: int, tensor: Tensor, reload: Reload) -> None:
        """Set a payload's memory, filled or awaited; a used-up payload gets all uses anew."""
        self.reloads[index], self.versions[index], self.device[index] = reload, -1, tensor
        if self.uses_left[index] > 0:
            self.num_away -= 1
        else:
            self.uses_left[index] = self.uses[index]


Wanted = tuple[Batch, list[int]]  # a batch, and the indices of its payloads to reload
