"""From saved tensors to payloads: what of a group is copied, each byte once.

Saved tensors are sorted by storage. A storage moves whole, and every view is made of it again, if
one view covers it, or if several views reach from its first byte to its last and together cover at
least half of it: so q, k and v, three views of one projection, move as one payload. Otherwise each
view is gathered: the bytes beside it belong to others, who may change them at any time. So do bytes
between views that count changes apart, as the parts of ``unsafe_chunk`` do: nobody would see it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, UntypedStorage

from pp_offload._core.subclasses import is_pending
from pp_offload._core.tensors import Geometry, is_whole_storage, storage_bytes
from pp_offload._transfer.ticket import Mover, PayloadTicket, SavedActivation, Ticket

Parts = tuple[Tensor, list[SavedActivation], UntypedStorage | None, bool]
"""A payload, the saved tensors it holds, the storage if it is all of one, whether it has gaps."""


def tickets_for(saved: Iterable[SavedActivation], transfer: Mover, label: str) -> list[Ticket]:
    """A ticket for every payload that ``saved`` needs, in the order of their last saves, for what
    was saved last is asked for first. Copies nothing.

    What was changed in place, or a collective has still to fill, gets none.
    """
    by_storage: dict[UntypedStorage, tuple[Tensor, list[SavedActivation]]] = {}
    for one in saved:
        source = one.held
        if not isinstance(source, Tensor) or source._version != one.version:
            continue
        if one.inside is None or not is_pending(one.inside):
            storage = source.untyped_storage()
            if storage in by_storage:
                same = by_storage[storage] = by_storage.pop(storage)
                same[1].append(one)
            else:
                by_storage[storage] = source, [one]
    found: list[Ticket] = []
    for storage, (source, members) in by_storage.items():
        # Almost always; as is_whole_storage() says it, without a call for each tensor.
        is_whole = source.is_contiguous() and source.nbytes == storage.nbytes()
        if is_whole and len(members) == 1 and 1 not in source.shape:
            members[0].begin_with(transfer, label, source, storage, 1)
            found.append(members[0])
        else:
            parts = _of_one_storage(source, members, storage)
            found += [PayloadTicket(transfer, label, *part) for part in parts]
    return found


def _of_one_storage(
    source: Tensor, saved: list[SavedActivation], storage: UntypedStorage
) -> list[Parts]:
    """The payloads of one storage; ``source`` is the tensor of the first of ``saved``."""
    if storage.nbytes() == 0:  # emptied by an owner who will fill it again, as FSDP does
        return []
    by_geometry: dict[Geometry, list[SavedActivation]] = {}
    views: dict[Geometry, Tensor] = {}
    for one in saved:
        if isinstance(one.held, Tensor):  # as all of them do
            geometry = Geometry.of(one.held)
            views.setdefault(geometry, one.held)
            by_geometry.setdefault(geometry, []).append(one)
    sizes = [g.distinct_numel * g.dtype.itemsize for g in by_geometry]
    covered = sum(sizes)
    whole = storage_bytes(source)
    begin = min(g.offset * g.dtype.itemsize for g in by_geometry)
    end = max((g.offset + g.span_numel) * g.dtype.itemsize for g in by_geometry)
    is_all = begin == 0 and end == storage.nbytes()
    has_to_cover = len(by_geometry) == 1 or any(one.origin is not saved[0].origin for one in saved)
    enough = storage.nbytes() if has_to_cover else storage.nbytes() / 2
    if not is_all or covered < enough or whole is None:
        return [
            _gathered(view, geometry, by_geometry[geometry]) for geometry, view in views.items()
        ]
    if len(by_geometry) == 1 and is_whole_storage(source, storage):
        return [(source, saved, storage, False)]
    for geometry, same in by_geometry.items():
        for one in same:
            one.restore = geometry.on_storage_of
    # Views may overlap, so only one that is all of it says that there is nothing between them.
    return [(whole, saved, storage, max(sizes) < storage.nbytes())]


def _gathered(view: Tensor, geometry: Geometry, saved: list[SavedActivation]) -> Parts:
    for one in saved:
        one.restore = geometry.scattered
    return geometry.narrowed().on_storage_of(view), saved, None, False
