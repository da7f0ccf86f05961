"""Which storages are on the host already, so that one saved in two groups is copied once.

Both the storage and its copy are held weakly and compared by identity: an address that the
allocator used again is never taken for the storage that had it before.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch import Tensor

from pp_offload._common.torch_private import use_count
from pp_offload._memory.buffers import in_shape
from pp_offload._transfer.block import Block
from pp_offload._transfer.tensors import StorageRef
from pp_offload._transfer.ticket import SavedActivation, Ticket

Entry = tuple[StorageRef, int, weakref.ref[Block], int, Tensor]
"""A storage, the version of it that was copied, the block, and its first byte and place there."""


class CopyIndex:
    """Blocks of this step, by the key of a storage that was copied there."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}

    def share(self, tickets: list[Ticket]) -> list[Ticket]:
        """Attach tickets to a copy of their storage that has the version they saved, if any.

        Returns:
            The tickets without such a copy.
        """
        if not self._entries:
            return tickets
        left = []
        for ticket in tickets:
            storage = ticket.storage
            entry = None if storage is None else self._entries.get(storage._cdata)
            if entry is None or entry[0]() is not storage or not _has_shared(ticket, entry):
                left.append(ticket)
        return left

    def add(self, tickets: Iterable[Ticket]) -> None:
        """Remember that the tickets' blocks hold their storages, as their members saved them.

        A storage that nothing but the ticket holds cannot be saved again, and is not remembered.
        """
        for ticket in tickets:
            storage, block, place = ticket.storage, ticket.block, ticket.host_bytes
            if storage is None or use_count(storage._cdata) <= 2:  # the ticket's, and this one
                continue
            members = ticket.members
            if _are_parts(members):
                continue
            refs, version = (weakref.ref(storage), weakref.ref(block)), members[0].version
            self._entries[storage._cdata] = refs[0], version, refs[1], ticket.begin, place

    def forget_dead(self) -> None:
        """Forget storages and blocks that are gone, for a program that never ends a step."""
        entries = self._entries.items()
        dead = [key for key, (storage, _, block, *_) in entries if not (storage() and block())]
        for key in dead:
            del self._entries[key]

    def clear(self) -> None:
        """Forget all. A storage saved again is copied again."""
        self._entries.clear()


def _has_shared(ticket: Ticket, entry: Entry) -> bool:
    """Attach a ticket to the block that has its storage, if that has what it saved."""
    _, version, block_ref, begin, place = entry
    block, payload, members = block_ref(), ticket.payload, ticket.members
    if version != members[0].version or _are_parts(members):
        return False
    if block is None or begin in block.harmed or place.nbytes != ticket.nbytes:
        return False
    ticket.attach(block, begin, in_shape(place, payload.shape, payload.dtype))
    return True


def _are_parts(members: Sequence[SavedActivation]) -> bool:
    """Whether some are inside a wrapper, which counts changes in place that their own version
    misses.
    """
    for member in members:  # faster than any()
        if member.inside is not None:
            return True
    return False
