"""Which storages are on the host already, so that one saved in two groups is copied once.

Both the storage and its copy are held weakly and compared by identity: an address that the
allocator used again is never taken for the storage that had it before. A copy is shared as long as
autograd holds a tensor that was saved there, so that a change unseen in between would be wrong
without offload, too; and not if it has bytes between views, which nobody saved.

NOTE [ Whose version ]
    Tensors with one memory may count changes apart: the parts of ``unsafe_chunk``, or what
    ``.data`` gives. Then the same number of two of them says nothing. So a copy is shared if
    nothing that saved it, then or now, was ever changed; or if all are aliases of one tensor, and
    at the same version of that. A change that none of their counters has seen, autograd would not
    see either.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pp_offload._common.torch_private import disable_current_modes, use_count
from pp_offload._core.tensors import StorageRef
from pp_offload._memory.buffers import in_shape
from pp_offload._transfer.block import Block
from pp_offload._transfer.ticket import PayloadTicket, SavedActivation, Ticket


class AsSaved(NamedTuple):
    """How a storage was saved, by which a later save is compared: see NOTE [ Whose version ]."""

    version: int
    """Of all that saved it."""

    origin: weakref.ref[Tensor] | None
    """What all are aliases of; None where that need not be known."""

    counters: tuple[Tensor, ...]
    """Without memory, with the version counters of all; none where the origin is known."""

    @classmethod
    def of(cls, members: Sequence[SavedActivation]) -> AsSaved | None:
        """None if no later save can be compared: one is inside a wrapper, which counts changes that
        its own version misses, or they were changed, and count changes apart.
        """
        version = members[0].version
        origin = members[0].origin if version else None
        if not _are_all(members, version, origin):
            return None
        counters = []
        for one in members:
            if not version and isinstance(one.held, Tensor):
                counters.append(_counter_of(one.held))
        return cls(version, origin, tuple(counters))

    def is_that_of(self, members: Sequence[SavedActivation]) -> bool:
        """Whether these saved the same bytes."""
        if not _are_all(members, self.version, self.origin):
            return False
        for counter in self.counters:
            if counter._version:
                return False
        return True


class Entry(NamedTuple):
    """A storage that was copied, and where to."""

    storage: StorageRef
    saved: AsSaved
    block: weakref.ref[Block]

    ticket: weakref.ref[Ticket]
    """Whose bytes were copied. Others that share them are noted with the block."""

    begin: int
    """Its first byte in the block."""

    place: Tensor


class CopyIndex:
    """Blocks of this step, by the key of a storage that was copied there."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}

    def share(self, tickets: list[Ticket]) -> list[Ticket]:
        """Attach tickets to a copy of their storage as they saved it, if there is one.

        Returns:
            The tickets without such a copy.
        """
        if not self._entries:
            return tickets
        left = []
        for ticket in tickets:
            storage = ticket.storage
            entry = None if storage is None else self._entries.get(storage._cdata)
            if entry is None or entry.storage() is not storage or not _has_shared(ticket, entry):
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
            if isinstance(ticket, PayloadTicket) and ticket.has_gaps:
                continue
            # As members says it, without a call.
            members = (ticket,) if isinstance(ticket, SavedActivation) else ticket.members
            saved = AsSaved.of(members)
            if saved is not None:
                refs = weakref.ref(block), weakref.ref(ticket)
                entry = Entry(weakref.ref(storage), saved, *refs, ticket.begin, place)
                self._entries[storage._cdata] = entry

    def forget_dead(self) -> None:
        """Forget storages and blocks that are gone, for a program that never ends a step."""
        entries = self._entries.items()
        dead = [key for key, one in entries if not (one.storage() and one.block())]
        for key in dead:
            del self._entries[key]

    def clear(self) -> None:
        """Forget all. A storage saved again is copied again."""
        self._entries.clear()


def _has_shared(ticket: Ticket, entry: Entry) -> bool:
    """Attach a ticket to the block that has its storage, if that has what it saved."""
    block, begin, place, payload = entry.block(), entry.begin, entry.place, ticket.payload
    if not entry.saved.is_that_of(ticket.members):
        return False
    if block is None or begin in block.harmed or place.nbytes != ticket.nbytes:
        return False
    if entry.ticket() is None and not any(ref() for ref in block.shared.get(begin, ())):
        return False  # the block is there for others
    ticket.attach(block, begin, in_shape(place, payload.shape, payload.dtype))
    return True


def _are_all(
    members: Sequence[SavedActivation], version: int, origin: weakref.ref[Tensor] | None
) -> bool:
    """Whether all are at this version, are aliases of ``origin`` if given, and in no wrapper."""
    for one in members:  # faster than all()
        if one.version != version or one.inside is not None:
            return False
        if origin is not None and one.origin is not origin:
            return False
    return True


_NOTHING: dict[torch.device, Tensor] = {}


def _counter_of(tensor: Tensor) -> Tensor:
    """An alias with the version counter of a tensor, which keeps none of its memory."""
    alias = tensor.detach()
    nothing = _NOTHING.get(alias.device)
    if nothing is None:
        with disable_current_modes():  # it is no memory of the program's
            nothing = _NOTHING[alias.device] = torch.empty(0, device=alias.device)
    alias.data = nothing
    return alias
