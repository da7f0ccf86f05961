"""A group on its way to the tiers: each batch goes to the first one with room.

nbytes = send(tickets, tiers, copies, poll)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from pp_offload._memory.buffers import PART_ALIGNMENT
from pp_offload._memory.unfinished import when_finished
from pp_offload._transfer.block import Block
from pp_offload._transfer.copies import Copies
from pp_offload._transfer.ticket import Ticket
from pp_offload._transfer.tier import Tier

PACK_BYTES = 2**20
"""Payloads that fit into so much together share a buffer, and give it back together."""


def send(
    tickets: Sequence[Ticket], tiers: Sequence[Tier], copies: Copies, poll: Callable[[], None]
) -> int:
    """Place and store a group. Not to be called with the lock held.

    Args:
        tickets: At least one.
        tiers: In the order in which they are asked.
        copies: Whose lock is held, and whose listeners are told of each batch that is stored.
        poll: Lets go of what has ended, which may make room.

    Returns:
        Bytes.

    Raises:
        MemoryError: The last tier has no room either.
    """
    nbytes = 0
    gathered: dict[Tier, tuple[list[Ticket], list[Block]]] = {}
    for batch, room in packs(tickets):
        tier, blocks = when_finished(copies.lock, _place, batch, room, tiers, poll)
        if tier.is_gathering:
            found, known = gathered.setdefault(tier, ([], []))
            found += batch
            known += blocks
        else:
            nbytes += _store(tier, batch, blocks, copies)
    for tier, (found, known) in gathered.items():
        nbytes += _store(tier, found, known, copies)
    return nbytes


def packs(tickets: Sequence[Ticket]) -> list[tuple[list[Ticket], int]]:
    """Tickets that share a block, and the bytes it takes: small ones together, others alone."""
    found: list[tuple[list[Ticket], int]] = []
    batch: list[Ticket] = []
    room = 0
    for ticket in tickets:
        nbytes = ticket.nbytes
        if batch and room + nbytes > PACK_BYTES:
            found.append((batch, room if len(batch) > 1 else batch[0].nbytes))
            batch, room = [], 0
        batch.append(ticket)
        room += -(-nbytes // PART_ALIGNMENT) * PART_ALIGNMENT
    found.append((batch, room if len(batch) > 1 else batch[0].nbytes))
    return found


def _place(
    batch: list[Ticket], nbytes: int, tiers: Sequence[Tier], poll: Callable[[], None]
) -> tuple[Tier, list[Block]]:
    """Room in the first tier that has some."""
    poll()
    *others, last = tiers
    for tier in others:
        with suppress(MemoryError):  # then the next one is asked
            return tier, tier.allocate(batch, nbytes)
    return last, last.allocate(batch, nbytes)


def _store(tier: Tier, tickets: list[Ticket], blocks: list[Block], copies: Copies) -> int:
    with copies.lock:
        nbytes = tier.store(tickets, blocks)
        for heard in copies.listeners.offloaded:
            heard(tickets[0].label, nbytes)
    return nbytes
