"""Which storages left already, so that one that several groups save is copied once.

A storage and its copy are held weakly and compared by identity: an address that the allocator uses
again is never taken for the storage that had it before. A copy is shared while autograd holds a
tensor that was saved with it, so that a change which no counter sees would be wrong without
offload, too.

A storage of eight-bit elements that the next microbatch saves again is no activation, but a copy
of a quantized weight, or a mask. Its owner holds it, so to offload it would free nothing. It stays
from the next step on, for the microbatches of a step are planned as if they were equal. Wider
elements may be a buffer that a pipeline receives activations in.

NOTE [ Whose version ]
    Tensors with one memory may count changes apart: the parts of ``unsafe_chunk``, or what
    ``.data`` gives. Then the same number of two of them says nothing. So a copy is shared if
    nothing that saved it, then or now, was ever changed; or if all are aliases of one tensor, and
    at the same version of that. A change that none of their counters has seen, autograd would not
    see either.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from pp_offload._common.torch_private import disable_current_modes, use_count
from pp_offload._core.batch import Batch
from pp_offload._core.keys import ChunkKey
from pp_offload._core.payloads import ByStorage, Payloads
from pp_offload._core.saved import Saved
from pp_offload._core.tensors import Geometry

NUM_OWN_HOLDERS = 2
"""Of a storage: the saved tensor, and the column of storages. Any other may save it again."""


class Copy(NamedTuple):
    """A storage that left with a payload of a batch.

    Attributes:
        saved: The first tensor that was saved with it.
        counters: Without memory, with the version counters of all that saved it at version 0.
        position: Which payload of the batch.
        chunk: Microbatch that saved it; None if the group has no place in a step.
    """

    storage: weakref.ref[UntypedStorage]
    saved: weakref.ref[Saved]
    counters: tuple[Tensor, ...]
    batch: weakref.ref[Batch]
    position: int
    chunk: ChunkKey | None = None


class SharedCopies:
    """The payloads of this step that are whole storages, by the key of the storage."""

    def __init__(self) -> None:
        self.copies: dict[int, Copy] = {}
        self._last: dict[int, Copy] = {}
        self._repeated: list[weakref.ref[UntypedStorage]] = []

    def watch(self, saved: ByStorage) -> None:
        """Look which eight-bit storages this microbatch saves that an earlier one has offloaded."""
        for key, (storage, members) in saved.items():
            if members[0].here.dtype.itemsize > 1:
                continue
            copy, group = self.copies.get(key), members[0].group
            if copy is None or copy.storage() is not storage:
                copy = self._last.get(key)
            elif copy.chunk is None or group.key is None or copy.chunk == group.key.chunk:
                continue  # another group of the same microbatch
            if copy is not None and copy.storage() is storage:
                self._repeated.append(copy.storage)

    def repeated(self) -> list[UntypedStorage]:
        """Storages that several microbatches have saved, since the last call."""
        refs, self._repeated = self._repeated, []
        return [storage for ref in refs if (storage := ref()) is not None]

    def share(self, payloads: Payloads) -> dict[int, tuple[Batch, int]]:
        shared: dict[int, tuple[Batch, int]] = {}
        for position, storage in enumerate(payloads.storages):
            copy = None if storage is None else self.copies.get(storage._cdata)
            if copy is None or copy.storage() is not storage:
                continue
            batch, members = copy.batch(), payloads.members[position]
            if batch is not None and _is_same(copy, batch, members):
                shared[position] = batch, copy.position
        return shared

    def add(self, payloads: Payloads, batch: Batch) -> None:
        """Remember which storages left with ``batch``, before the members let go of them. A storage
        that nobody else holds cannot be saved again, and is not remembered.
        """
        for index, storage in enumerate(payloads.storages):
            if storage is None or use_count(storage._cdata) <= NUM_OWN_HOLDERS:
                continue
            members = payloads.members[index]
            counters: tuple[Tensor, ...] = ()
            for member in members:
                if member.wrapper is not None:
                    break  # the wrapper counts changes that the version of its part misses
                counters += (_counter_of(member.tensor),)
            else:
                counters = () if members[0].version else counters
                refs = weakref.ref(storage), weakref.ref(members[0])
                key = members[0].group.key
                chunk = None if key is None else key.chunk
                copy = Copy(*refs, counters, weakref.ref(batch), index, chunk)
                self.copies[storage._cdata] = copy

    def forget_dead(self) -> None:
        """Forget what is gone, for a program that never ends a step."""
        copies = self.copies.items()
        for key in [key for key, copy in copies if not (copy.storage() and copy.batch())]:
            del self.copies[key]

    def clear(self) -> None:
        """Begin a step, or a forward without steps: no copy is shared with the last."""
        self._last, self.copies = self.copies, {}


def _is_same(copy: Copy, batch: Batch, members: Sequence[Saved]) -> bool:
    """Whether the copy has what these saved; see NOTE [ Whose version ]."""
    first = copy.saved()
    if first is None or copy.position in batch.changed:
        return False
    for member in members:
        if member.version != first.version or member.wrapper is not None:
            return False
        if first.version and member.origin is not first.origin:
            return False
    return not any([counter._version for counter in copy.counters])


def restored_from(batch: Batch, index: int, member: Saved) -> None:
    """Have a saved tensor be made of a payload that may be shaped like another view."""
    (shape, dtype), tensor = batch.specs[index], member.tensor
    assert tensor is not None
    if shape != tensor.shape or dtype != tensor.dtype or not tensor.is_contiguous():
        member.restore = partial(_view_of, Geometry.of(tensor))
    elif 1 in tensor.shape:
        member.restore = Geometry.of(tensor).on_storage_of
    else:
        member.restore = None


def _view_of(geometry: Geometry, payload: Tensor) -> Tensor:
    """A view of the storage whose bytes ``payload`` has."""
    return geometry.on_storage_of(payload.flatten().view(torch.uint8))


_NOTHING: dict[torch.device, Tensor] = {}


def _counter_of(tensor: Tensor | None) -> Tensor:
    """An alias with the version counter of a tensor, which keeps none of its memory."""
    assert tensor is not None
    alias = tensor.detach()
    nothing = _NOTHING.get(alias.device)
    if nothing is None:
        with disable_current_modes():  # it is no memory of the program's
            nothing = _NOTHING[alias.device] = torch.empty(0, device=alias.device)
    alias.data = nothing
    return alias
