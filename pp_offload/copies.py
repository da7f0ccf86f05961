"""Which storages are on the host already, so that one saved in two groups is copied once.

Both the storage and its copy are held weakly and compared by identity: an address that the
allocator used again is never taken for the storage that had it before.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from pp_offload.transfer import HostCopy


@dataclass(frozen=True, slots=True)
class _Entry:
    storage: weakref.ref[torch.UntypedStorage]
    copy: weakref.ref[HostCopy]
    version: int


class CopyIndex:
    """Host copies by the storage they were made of."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def find(self, tensor: Tensor, nbytes: int) -> HostCopy | None:
        """The copy of the tensor's whole storage as it is now, if there is one."""
        storage = tensor.untyped_storage()
        entry = self._entries.get(storage._cdata)
        if entry is None or entry.storage() is not storage or entry.version != tensor._version:
            return None
        copy = entry.copy()
        if copy is None or copy.is_modified or copy.buffer.nbytes != nbytes:
            return None
        return copy

    def add(self, tensor: Tensor, version: int, copy: HostCopy) -> None:
        """Remember that ``copy`` holds the storage of ``tensor`` at ``version``."""
        storage = tensor.untyped_storage()
        key, entries = storage._cdata, self._entries

        def forget(ref: weakref.ref[HostCopy]) -> None:
            entry = entries.get(key)
            if entry is not None and entry.copy is ref:
                del entries[key]

        entries[key] = _Entry(weakref.ref(storage), weakref.ref(copy, forget), version)
