"""Storages that left already, so that a storage that several groups save is copied once.

A storage and its copy are held weakly and compared by identity: an address that the allocator uses
again is never taken for the storage that had it before. A microbatch shares its own copies, while
autograd holds a tensor that was saved with them, so that a change which no counter sees would be
wrong without offload, too. The graph of another one may live for no backward.

A storage of eight-bit elements that the next microbatch saves again is no activation, but a copy
of a quantized weight, or a mask. Its owner holds it, so an offload would free nothing. It stays
from the next step on, for the microbatches of a step are planned as if they were equal. Wider
elements may be a buffer that a pipeline receives activations in.

NOTE [ Whose version ]
    Tensors with one memory may count changes apart: the parts of ``unsafe_chunk``, or what
    ``.data`` gives. Then equal versions of two of them prove nothing. So a copy is shared if no
    tensor that saved it, then or now, was ever changed; or if all are aliases of one tensor, at
    the same version of that. Autograd would not see a change that none of their counters has seen.
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
from pp_offload._core.eligibility import StorageSet
from pp_offload._core.geometry import Geometry
from pp_offload._core.group import Group
from pp_offload._core.payloads import ByStorage, Payloads
from pp_offload._core.saved import Saved

NUM_OWN_HOLDERS = 2  # of a storage: a saved tensor and a column; any other may save it again


class Copy(NamedTuple):
    """A storage that left with a payload of a batch."""

    storage: weakref.ref[UntypedStorage]
    saved: weakref.ref[Saved]  # the first tensor that was saved with it
    counters: tuple[Tensor, ...]  # version counters of tensors saved at version 0, without memory
    batch: weakref.ref[Batch]
    position: int  # of the payload in the batch
    microbatch: int | None  # that saved it; None if the group has no place in a step


class SharedCopies:
    """Payloads of this step that are whole storages, by the key of the storage."""

    def __init__(self) -> None:
        self.copies: dict[int, Copy] = {}
        self._last: dict[int, Copy] = {}
        self._repeated: list[weakref.ref[UntypedStorage]] = []

    def watch(self, saved: ByStorage) -> None:
        """Note eight-bit storages that this microbatch saves and an earlier one has offloaded."""
        for key, (storage, members) in saved.items():
            if members[0].here.dtype.itemsize > 1:
                continue
            copy, group = self.copies.get(key), members[0].group
            if copy is None or copy.storage() is not storage:
                copy = self._last.get(key)
            elif copy.microbatch is None or microbatch_of(group) in (None, copy.microbatch):
                continue  # another group of the same microbatch
            if copy is not None and copy.storage() is storage:
                self._repeated.append(copy.storage)

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
        """Remember which storages left with ``batch``, before the members let go of them. A
        storage without another holder cannot be saved again, and is not remembered.
        """
        for index, storage in enumerate(payloads.storages):
            if storage is None or use_count(storage._cdata) <= NUM_OWN_HOLDERS:
                continue
            members = payloads.members[index]
            if any([member.wrapper is not None for member in members]):
                continue  # the wrapper counts changes that the version of its part misses
            unchanged = () if members[0].version else members
            counters = tuple([_counter_of(member.tensor) for member in unchanged])
            refs = weakref.ref(storage), weakref.ref(members[0])
            number = microbatch_of(members[0].group)
            self.copies[storage._cdata] = Copy(*refs, counters, weakref.ref(batch), index, number)

    def begin_step(self, residents: StorageSet) -> None:
        """Begin a step, or a forward without steps: it shares no copy of the one before, and what
        several microbatches saved is resident.
        """
        refs, self._repeated = self._repeated, []
        for ref in refs:
            if (storage := ref()) is not None:
                residents.add_storage(storage)
        self._last, self.copies = self.copies, {}


def microbatch_of(group: Group) -> int | None:
    return None if group.key is None else group.key.chunk.microbatch


def _is_same(copy: Copy, batch: Batch, members: Sequence[Saved]) -> bool:
    """Whether the copy has the bytes of ``members``; see NOTE [ Whose version ]."""
    first = copy.saved()
    if first is None or copy.position in batch.changed:
        return False
    if copy.microbatch != microbatch_of(members[0].group):
        return False
    for member in members:
        if member.version != first.version or member.wrapper is not None:
            return False
        if first.version and member.origin is not first.origin:
            return False
    return not any([counter._version for counter in copy.counters])


def restored_from(batch: Batch, index: int, member: Saved) -> None:
    """Set how ``member`` is made of a payload that may be shaped like another view."""
    (shape, dtype), tensor = batch.specs[index], member.tensor
    assert tensor is not None
    if shape != tensor.shape or dtype != tensor.dtype or not tensor.is_contiguous():
        member.restore = partial(_view_of, Geometry.of(tensor))
    elif 1 in tensor.shape:
        member.restore = Geometry.of(tensor).on_storage_of
    else:
        member.restore = None


def _view_of(geometry: Geometry, payload: Tensor) -> Tensor:
    """Return a view of the storage whose bytes are in ``payload``."""
    return geometry.on_storage_of(payload.flatten().view(torch.uint8))


_NOTHING: dict[torch.device, Tensor] = {}


def _counter_of(tensor: Tensor | None) -> Tensor:
    """Return an alias with the version counter of a tensor, and none of its memory."""
    assert tensor is not None
    alias = tensor.detach()
    nothing = _NOTHING.get(alias.device)
    if nothing is None:
        with disable_current_modes():  # not memory of the program
            nothing = _NOTHING[alias.device] = torch.empty(0, device=alias.device)
    alias.data = nothing
    return alias
