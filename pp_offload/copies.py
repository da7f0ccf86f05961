"""Which storages are on the host already, so that one saved in two groups is copied once.

Both the storage and its copy are held weakly and compared by identity: an address that the
allocator used again is never taken for the storage that had it before.
"""

from __future__ import annotations

import weakref

from pp_offload.transfer import HostCopy, Ticket


class CopyIndex:
    """Host copies made in this step, by the storage they were made of."""

    def __init__(self) -> None:
        self._copies: dict[int, weakref.ref[HostCopy]] = {}

    def share(self, ticket: Ticket) -> bool:
        """Give ``ticket`` the copy of its storage as it is now, if there is one."""
        payload = ticket.payload
        if payload is None or not ticket.is_storage:
            return False
        storage = payload.untyped_storage()
        ref = self._copies.get(storage._cdata)
        copy = None if ref is None else ref()
        if copy is None or copy.is_modified or copy.buffer.nbytes != ticket.nbytes:
            return False
        is_same = copy.origin is not None and copy.origin() is storage
        if is_same and copy.version == ticket.members[0].version:
            ticket.copy = copy
            return True
        return False

    def add(self, ticket: Ticket) -> None:
        """Remember that the ticket's copy holds its storage, as its members saved it."""
        payload, copy = ticket.payload, ticket.copy
        if payload is None or copy is None or not ticket.is_storage:
            return
        storage = payload.untyped_storage()
        copy.origin = weakref.ref(storage)
        copy.version = ticket.members[0].version
        self._copies[storage._cdata] = weakref.ref(copy)

    def clear(self) -> None:
        """Forget all. A storage saved again is copied again."""
        self._copies.clear()
