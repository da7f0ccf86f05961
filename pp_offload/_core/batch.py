"""The bytes of one group off the device: one place on the host, one event each way.

    leaving      ``leaving`` keeps the device memory until the copy to the host has run
    away         only ``place`` has the bytes; on disk alone, ``write``, until a thread reads them
    coming back  ``back.device[i]`` is memory for payload i, ``back.reloads[i]`` has its event
    used up      ``back.device[i]`` is None; ``back.given[i]`` refers weakly to what autograd got

Autograd owns a batch, through the saved tensors in it, and its memory returns when the last of them
goes. Autograd frees nodes in C++, where an exception from Python code is lost. So the callbacks of
weak references are C functions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor

from pp_offload.backends import Event, Stream

Spec = tuple[torch.Size, torch.dtype]
"""The shape and dtype of a payload."""


class Reload:
    """How payloads became available together, and for which stream: by a copy, or taken back.

    Attributes:
        stream: The compute stream that their memory was allocated on, and that may use it.
        event: Behind the copy; None where there is none, or an exception came while it was queued.
        is_there: Whether that stream has waited for it.
    """

    __slots__ = ("event", "is_there", "stream")

    def __init__(self, stream: Stream, *, is_there: bool = False) -> None:
        self.stream = stream
        self.event: Event | None = None
        self.is_there = is_there

    @property
    def is_cut_off(self) -> bool:
        """Whether an exception came while its copy was queued, which may run all the same."""
        return self.event is None and not self.is_there


class Leaving:
    """What a copy to the host reads, until it has run.

    Args:
        batch: Whose payloads are copied, behind ``batch.offloaded``.
        payloads: The Payloads, whose members are on the device still.
        stream: The compute stream of the commit, on which sources may be taken back.

    Attributes:
        batch: Weakly: its host memory is free when autograd lets go, with an event for the next
            owner.
        watched: Tensors that share the memory of the sources: whoever changes one changes a source.
        versions: Of each watched tensor when it was saved.
        indices: The payload that each watched tensor belongs to.
        addresses: Of the sources; an owner may empty a storage, and fill it again elsewhere.
    """

    __slots__ = "addresses batch indices nbytes offloaded sources stream versions watched".split()

    def __init__(self, batch: Batch, payloads: Any, stream: Stream) -> None:
        self.batch, self.offloaded, self.stream = weakref.ref(batch), batch.offloaded, stream
        self.sources: Sequence[Tensor] = payloads.tensors
        self.nbytes = sum(payloads.sizes)
        self.addresses = list(map(_address, self.sources))
        self.watched: list[Tensor] = []
        self.versions: list[int] = []
        self.indices: list[int] = []
        for index, members in enumerate(payloads.members):
            if index in payloads.gathered:
                continue  # its source is a copy, which nobody can change
            for member in members:
                self.watched.append(member.tensor)
                self.versions.append(member.version)
                self.indices.append(index)

    def watch(self, saved: Any, index: int) -> None:
        """Watch a saved tensor on the device, whose bytes are a payload's."""
        self.watched.append(saved.tensor)
        self.versions.append(saved.version)
        self.indices.append(index)

    def changed(self) -> frozenset[int]:
        """Payloads whose source is not as it was when it was saved."""
        changed = set()
        if list(map(_version, self.watched)) != self.versions:  # loops in C: thousands may leave
            saved = zip(self.watched, self.versions, self.indices, strict=True)
            for tensor, version, index in saved:
                if tensor._version != version:
                    changed.add(index)
        addresses = list(map(_address, self.sources))
        if addresses != self.addresses:
            pairs = enumerate(zip(addresses, self.addresses, strict=True))
            changed.update(index for index, (now, before) in pairs if now != before)
        return frozenset(changed)


_version = attrgetter("_version")
_address = methodcaller("data_ptr")


class Batch:
    """The payloads of one group off the device.

    Args:
        mover: The Mover that orders its copies.
        label: Name of the group, for messages.
        sizes: Bytes of each payload.
        specs: Shape and dtype of each.
        uses: How many saved tensors each payload holds.
        is_gone: A C function, called with ``back`` when the batch goes.

    Attributes:
        place: Host memory that has the bytes; None once they are on disk alone.
        passage: Owns that memory, where the bytes only pass through it to the disk.
        write: The bytes on disk, or on their way there, if they go there.
        reading: The end of the read that brings them back to host memory; None before the read is
            queued, when it has failed, and once they are on the device.
        offloaded: Behind the copy to the host.
        leaving: What that copy reads; None once it has run.
        changed: Payloads that were changed in place before their copy had run.
        back: What is on the device again.
        later: Of each payload that several groups use, the uses still to come: by ``id`` of a group
            that backward has not reached; of its own group by None; of the second part of a
            backward by ``id`` of its SplitBackward. It says what stays; no tensor depends on it.
    """

    __slots__ = (
        "__weakref__ back changed label later leaving mover offloaded passage place reading sizes "
        "specs write".split()
    )

    place: Any
    passage: Any
    write: Any
    offloaded: Event

    def __init__(
        self,
        mover: Any,
        label: str,
        sizes: list[int],
        specs: list[Spec],
        uses: list[int],
        is_gone: Callable[[Back], None],
    ) -> None:
        self.mover, self.label, self.sizes, self.specs = mover, label, sizes, specs
        self.passage = self.write = None
        self.reading: Event | None = None
        self.leaving: Leaving | None = None
        self.changed: frozenset[int] = frozenset()
        self.later: dict[int, dict[int | None, int]] = {}
        self.back = Back(self, uses, is_gone)

    def use_again(self, index: int, num: int, group: int) -> None:
        """So many more saved tensors hold a payload, of a group with this ``id``."""
        back = self.back
        uses = self.later.setdefault(index, {None: back.left[index]})
        uses[group] = uses.get(group, 0) + num  # shared, and needed by a recipe, too
        back.uses[index] += num
        if back.left[index] == 0 and back.device[index] is None:
            back.num_away += 1  # it was used up, and is to be used again
        back.left[index] += num


class Back(weakref.ref[Batch]):
    """What is on the device again of a batch, by payload. It outlives the batch: memory that a copy
    still writes is kept until the copy has run.

    Attributes:
        device: Memory on the device; None before, and when it is used up.
        reloads: The copy that it came with.
        versions: Of the memory when it was last given out; -1 before.
        given: What autograd got, when it was taken out.
        uses: How often it will be used each time it comes anew.
        left: How many uses are to come; 0 when it is used up.
        num_away: Payloads to be used, in any part of backward, that are neither on the device nor
            on their way.
        part: Where backward comes in two parts, the payloads that the first has still to use; the
            others are for the second one. None where there is one part, or the first is over.
        sizes: In bytes.
        checksums: Of the payloads when they left, with ``verify``.
    """

    __slots__ = "checksums device given left num_away part reloads sizes uses versions".split()

    __eq__ = object.__eq__  # equal weak references to one object would be one element of a set
    __hash__ = object.__hash__

    def __new__(cls, batch: Batch, uses: list[int], is_gone: Callable[[Back], None]) -> Back:
        return super().__new__(cls, batch, is_gone)  # type: ignore[arg-type]

    def __init__(self, batch: Batch, uses: list[int], is_gone: Callable[[Back], None]) -> None:
        num = self.num_away = len(batch.sizes)
        self.device: list[Tensor | None] = [None] * num
        self.reloads: list[Reload | None] = [None] * num
        self.given: list[weakref.ref[Tensor] | None] = [None] * num
        self.versions, self.uses, self.left = [-1] * num, uses, uses.copy()
        self.part: frozenset[int] | None = None
        self.sizes = batch.sizes
        self.checksums: Sequence[int] = ()

    def away(self) -> list[int]:
        """Payloads that this part of backward will use and that are neither on the device nor on
        their way.
        """
        uses_left, part = self.left, self.part
        away = [i for i, tensor in enumerate(self.device) if tensor is None and uses_left[i] > 0]
        return away if part is None else [i for i in away if i in part]

    def put(self, index: int, tensor: Tensor, reload: Reload) -> None:
        """A payload is on the device, or on its way; if it was used up, for all its uses anew."""
        self.reloads[index], self.versions[index], self.device[index] = reload, -1, tensor
        if self.left[index] > 0:
            self.num_away -= 1
        else:
            self.left[index] = self.uses[index]


Wanted = tuple[Batch, list[int]]
"""Payloads of a batch that are to come back."""
