"""From saved tensors to payloads: what of a group is copied, each byte once.

Saved tensors are sorted by storage. A storage whose saved views cover half of it or more, alone or
together, moves as it is and every view finds its place in it again; so q, k and v, three views of
one projection, move as one payload. Otherwise each view is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from pp_offload.saved import SavedActivation
from pp_offload.tensors import Geometry, is_whole_storage, storage_bytes, storage_key
from pp_offload.ticket import Ticket
from pp_offload.transfer import TransferEngine

Parts = tuple[Tensor, list[SavedActivation], int | None]
"""A payload, the saved tensors it holds, and the key of the storage if it is all of one."""


def tickets_for(
    saved: Iterable[SavedActivation], transfer: TransferEngine, label: str
) -> list[Ticket]:
    """A ticket for every payload that ``saved`` needs. Copies nothing."""
    by_storage: dict[int, list[SavedActivation]] = {}
    for one in saved:
        by_storage.setdefault(storage_key(_source(one)), []).append(one)
    found: list[Ticket] = []
    for key, members in by_storage.items():
        source = _source(members[0])
        if len(members) == 1 and is_whole_storage(source):
            found.append(Ticket(transfer, label, source, members, key))
        else:
            found += [Ticket(transfer, label, *parts) for parts in _of_one_storage(members, key)]
    return found


def _of_one_storage(saved: list[SavedActivation], key: int) -> list[Parts]:
    by_geometry: dict[Geometry, list[SavedActivation]] = {}
    for one in saved:
        by_geometry.setdefault(Geometry.of(_source(one)), []).append(one)
    source = _source(saved[0])
    covered = sum(g.distinct_numel * g.dtype.itemsize for g in by_geometry)
    if 2 * covered < source.untyped_storage().nbytes():
        return [_gathered(geometry, same) for geometry, same in by_geometry.items()]
    if len(by_geometry) == 1 and is_whole_storage(source):
        return [(source, saved, key)]
    for geometry, same in by_geometry.items():
        for one in same:
            one.restore = geometry.on_storage_of
    return [(storage_bytes(source), saved, key)]


def _gathered(geometry: Geometry, saved: list[SavedActivation]) -> Parts:
    for one in saved:
        one.restore = geometry.scattered
    return geometry.narrowed().on_storage_of(_source(saved[0])), saved, None


def _source(saved: SavedActivation) -> Tensor:
    assert saved.source is not None, "saved tensor was offloaded before"
    return saved.source
