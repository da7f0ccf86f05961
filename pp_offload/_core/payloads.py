"""Payloads: the bytes of a group's saved tensors that are copied, each storage once.

Saved tensors are sorted by storage. A storage moves whole, and every view is made of it again, if
one view covers it, or if several views reach from its first byte to its last and together cover at
least half of it: q, k and v, three views of one projection, move as one payload. Otherwise each
view is gathered, since the bytes beside it belong to other tensors, which may change at any time.
So may bytes between views that count changes apart, as the parts of ``unsafe_chunk`` do.

    payloads = collect(by_storage(group.saved_refs))  # copies nothing
    payloads.gather()           # views that are gathered become contiguous, on the compute stream
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from pp_offload._core.geometry import Geometry, has_new_strides, storage_bytes
from pp_offload._core.saved import Saved, is_pending


@dataclass(slots=True, eq=False)
class Payloads:
    """The payloads of a group, by column."""

    tensors: list[Tensor] = field(default_factory=list)  # whole storages, and views to be gathered
    members: list[list[Saved]] = field(default_factory=list)  # saved tensors in each payload
    sizes: list[int] = field(default_factory=list)  # bytes of each payload
    # The storage that a payload fills; None for a view, or if some bytes of the storage belong to
    # no saved tensor.
    storages: list[UntypedStorage | None] = field(default_factory=list)
    views: list[int] = field(default_factory=list)  # indices of views to gather
    gathered: list[int] = field(default_factory=list)  # indices of views that gather() copied
    parts: list[int] = field(default_factory=list)  # indices of parts of saved tensors, for recipes
    # Bytes that the group holds beside payloads if it stays: the rest of storages of gathered
    # views, and storages that could be computed again.
    beside_bytes: int = 0
    chosen: Any = None  # recipes in place of copies; None without any

    def add(self, tensor: Tensor, members: list[Saved], storage: UntypedStorage | None) -> None:
        self.tensors.append(tensor)
        self.members.append(members)
        self.sizes.append(tensor.nbytes)
        self.storages.append(storage)

    def gather(self, observers: Iterable[Callable[[Saved, Tensor, Tensor], None]] = ()) -> None:
        """Make each view contiguous; a gather runs on the compute stream."""
        with torch.no_grad():
            for index in self.views:
                view = self.tensors[index]
                self.tensors[index] = copy = view.contiguous()
                if copy is not view:
                    self.gathered.append(index)
                    for tell in observers:
                        tell(self.members[index][0], view, copy)

    def stay_apart(self) -> None:
        """Replace each view that recipes need by a copy, so that the larger tensor can be freed."""
        with torch.no_grad():
            for index in self.parts:
                part = self.tensors[index].contiguous()
                for member in self.members[index]:
                    assert member.restore is not None
                    member.tensor, member.restore = member.restore(part), None
                    member.version = part._version

    def without(self, indices: Collection[int]) -> Payloads:
        rest = Payloads()
        for index, tensor in enumerate(self.tensors):
            if index not in indices:
                if index in self.views:
                    rest.views.append(len(rest.sizes))
                rest.add(tensor, self.members[index], self.storages[index])
        return rest


ByStorage = dict[int, tuple[UntypedStorage, list[Saved]]]
"""Saved tensors by the key of their storage; negative for a part of it that a recipe needs."""


def by_storage(refs: Iterable[weakref.ref[Saved]]) -> ByStorage:
    """Return, by storage, saved tensors that autograd still holds and that are on the device
    unchanged. The storage saved last comes last, for backward asks for it first.
    """
    by_storage: ByStorage = {}
    for ref in refs:
        saved = ref()
        if saved is None or (tensor := saved.tensor) is None or tensor._version != saved.version:
            continue
        if saved.wrapper is not None and is_pending(saved.wrapper):
            continue  # a collective has still to fill it
        storage = tensor.untyped_storage()
        key = storage._cdata
        members = by_storage.pop(key)[1] if key in by_storage else []
        members.append(saved)
        by_storage[key] = storage, members  # moved to the end
    return by_storage


def collect(by_storage: ByStorage) -> Payloads:
    payloads = Payloads()
    for key, (storage, members) in by_storage.items():
        tensor = members[0].tensor
        assert tensor is not None
        if key < 0:  # a part, for a recipe
            payloads.views.append(len(payloads.sizes))
            payloads.add(tensor, members, None)
            payloads.parts.append(payloads.views[-1])
            continue
        nbytes, num_bytes = tensor.nbytes, storage.nbytes()
        is_whole = nbytes == num_bytes and tensor.is_contiguous()
        is_alone = len(members) == 1 or all([saved.tensor is tensor for saved in members])
        if is_whole and is_alone and (1 not in tensor.shape or has_new_strides(tensor)):
            payloads.tensors.append(tensor)  # usual, so without a call
            payloads.members.append(members)
            payloads.sizes.append(nbytes)
            payloads.storages.append(storage)
        elif num_bytes:  # else its owner emptied it, and will fill it again, as FSDP does
            _add_views(payloads, members, storage)
    return payloads


def _add_views(payloads: Payloads, members: list[Saved], storage: UntypedStorage) -> None:
    """Add the payloads of one storage that is saved several times, or in part."""
    by_geometry: dict[Geometry, list[Saved]] = {}
    for member in members:
        by_geometry.setdefault(Geometry.of(member.here), []).append(member)
    first = members[0].here
    is_whole = first.nbytes == storage.nbytes() and first.is_contiguous()
    if len(by_geometry) == 1 and is_whole and has_new_strides(first):
        payloads.add(first, members, storage)
    elif (whole := _whole(by_geometry, first, storage)) is None:
        left_bytes = storage.nbytes()
        for geometry, same in by_geometry.items():
            for member in same:
                member.restore = geometry.scattered
            payloads.views.append(len(payloads.sizes))
            payloads.add(geometry.narrowed().on_storage_of(same[0].here), same, None)
            left_bytes -= payloads.sizes[-1]
        payloads.beside_bytes += max(0, left_bytes)  # views may overlap
    else:
        for geometry, same in by_geometry.items():
            for member in same:
                member.restore = geometry.on_storage_of
        # Views may overlap, so only a view of all bytes shows that none lies between them.
        has_gaps = max(g.nbytes for g in by_geometry) < storage.nbytes()
        payloads.add(whole, members, None if has_gaps else storage)


def _whole(
    by_geometry: dict[Geometry, list[Saved]], first: Tensor, storage: UntypedStorage
) -> Tensor | None:
    """Return the bytes of a storage that moves whole; None where its views are gathered."""
    begin = min(g.offset * g.dtype.itemsize for g in by_geometry)
    end = max((g.offset + g.span_numel) * g.dtype.itemsize for g in by_geometry)
    if begin or end != storage.nbytes():
        return None
    # Weak references to one object are the same object.
    origins = {id(member.origin) for same in by_geometry.values() for member in same}
    must_cover = len(by_geometry) == 1 or len(origins) > 1 or id(None) in origins
    enough = storage.nbytes() if must_cover else storage.nbytes() / 2
    return storage_bytes(first) if sum(g.nbytes for g in by_geometry) >= enough else None
