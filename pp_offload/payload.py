"""From saved tensors to payloads: what of a group is copied, each byte once.

Saved tensors are sorted by storage. A storage whose saved views cover half of it or more, alone or
together, moves as it is and every view finds its place in it again; so q, k and v, three views of
one projection, move as one payload. Otherwise each view is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pp_offload.saved import SavedActivation
from pp_offload.tensors import Geometry, is_whole_storage, storage_bytes
from pp_offload.transfer import Watched

Restore = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class Payload:
    """Bytes that move as one."""

    tensor: Tensor
    """A view of the device memory to copy. Contiguous, or to be gathered."""

    members: list[tuple[SavedActivation, Restore | None]]
    """The saved tensors these bytes hold, and how to make each of them."""

    is_storage: bool
    """Whether this is all of a storage, so that other groups may share the copy."""

    def watched(self) -> list[Watched]:
        """Aliases whose version tells whether the bytes are still those that were saved."""
        return [(one.source, one.version) for one, _ in self.members if one.source is not None]

    def gathered(self) -> Tensor:
        """The bytes to copy, contiguous. A gather runs on the compute stream."""
        if self.tensor.is_contiguous():
            return self.tensor
        with torch.no_grad():
            return self.tensor.contiguous()


def payloads(saved: Iterable[SavedActivation]) -> list[Payload]:
    """All bytes that ``saved`` needs. Copies nothing."""
    by_storage: dict[int, list[SavedActivation]] = {}
    for one in saved:
        assert one.source is not None
        by_storage.setdefault(one.source.untyped_storage()._cdata, []).append(one)
    found: list[Payload] = []
    for members in by_storage.values():
        first = members[0].source
        assert first is not None
        if len(members) == 1 and is_whole_storage(first):
            found.append(Payload(first, [(members[0], None)], True))
        else:
            found += _of_one_storage(members)
    return found


def _of_one_storage(members: list[SavedActivation]) -> list[Payload]:
    by_geometry: dict[Geometry, list[SavedActivation]] = {}
    for one in members:
        assert one.source is not None
        by_geometry.setdefault(Geometry.of(one.source), []).append(one)
    source = members[0].source
    assert source is not None
    covered = sum(g.distinct_numel * g.dtype.itemsize for g in by_geometry)
    if 2 * covered < source.untyped_storage().nbytes():
        return [_gathered(geometry, same) for geometry, same in by_geometry.items()]
    if len(by_geometry) == 1 and is_whole_storage(source):
        return [Payload(source, [(one, None) for one in members], True)]
    places: list[tuple[SavedActivation, Restore | None]] = [
        (one, geometry.on_storage_of) for geometry, same in by_geometry.items() for one in same
    ]
    return [Payload(storage_bytes(source), places, True)]


def _gathered(geometry: Geometry, members: list[SavedActivation]) -> Payload:
    source = members[0].source
    assert source is not None
    compact = geometry.narrowed().on_storage_of(source)
    return Payload(compact, [(one, geometry.scattered) for one in members], False)
