"""Which storages are on the host already, so that one saved in two groups is copied once.

Both the storage and its copy are held weakly and compared by identity: an address that the
allocator used again is never taken for the storage that had it before.
"""

from __future__ import annotations

import weakref

from pp_offload.tensors import StorageRef, num_holders
from pp_offload.ticket import HostCopy, Ticket

Entry = tuple[StorageRef, int, weakref.ref[HostCopy]]
"""A storage, the version of it that was copied, and the copy."""


class CopyIndex:
    """Host copies made in this step, by the key of the storage they were made of."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}

    def share(self, ticket: Ticket) -> bool:
        """Give ``ticket`` the copy of its storage as it is now, if there is one."""
        entry = None if ticket.storage_key is None else self._entries.get(ticket.storage_key)
        payload = ticket.payload
        if entry is None or payload is None:
            return False
        storage, version, copy_ref = entry
        copy = copy_ref()
        if copy is None or copy.is_modified or copy.buffer.nbytes != ticket.nbytes:
            return False
        if storage() is not payload.untyped_storage() or version != ticket.members[0].version:
            return False
        ticket.attach(copy)
        return True

    def add(self, ticket: Ticket) -> None:
        """Remember that the ticket's copy holds its storage, as its members saved it.

        A storage that nothing but the ticket holds cannot be saved again, and is not remembered.
        """
        key, payload, copy = ticket.storage_key, ticket.payload, ticket.copy
        if key is None or payload is None or copy is None:
            return
        storage = payload.untyped_storage()
        if num_holders(storage) > 1:
            self._entries[key] = weakref.ref(storage), ticket.members[0].version, weakref.ref(copy)

    def clear(self) -> None:
        """Forget all. A storage saved again is copied again."""
        self._entries.clear()
