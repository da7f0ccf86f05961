"""Which storages are on the host already, so that one saved in two groups is copied once.

Both the storage and its copy are held weakly and compared by identity: an address that the
allocator used again is never taken for the storage that had it before.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from pp_offload.transfer import HostCopy


class CopyIndex:
    """Host copies made in this step, by the storage they were made of."""

    def __init__(self) -> None:
        self._copies: dict[int, weakref.ref[HostCopy]] = {}

    def find(self, tensor: Tensor, nbytes: int) -> HostCopy | None:
        """The copy of the tensor's whole storage as it is now, if there is one."""
        storage = tensor.untyped_storage()
        ref = self._copies.get(storage._cdata)
        copy = None if ref is None else ref()
        if copy is None or copy.is_modified or copy.buffer.nbytes != nbytes:
            return None
        is_same = copy.origin is not None and copy.origin() is storage
        return copy if is_same and copy.version == tensor._version else None

    def add(self, tensor: Tensor, version: int, copy: HostCopy) -> None:
        """Remember that ``copy`` holds the storage of ``tensor`` at ``version``."""
        storage = tensor.untyped_storage()
        copy.origin = weakref.ref(storage)
        copy.version = version
        self._copies[storage._cdata] = weakref.ref(copy)

    def clear(self) -> None:
        """Forget all. A storage saved again is copied again."""
        self._copies.clear()
