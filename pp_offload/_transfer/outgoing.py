"""A group on its way to the tiers: each batch goes to the first one with room.

outgoing = Outgoing(tiers, copies, poll)
nbytes = outgoing.send(tickets)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from pp_offload._memory.unfinished import when_finished
from pp_offload._transfer.block import Block
from pp_offload._transfer.copies import Copies
from pp_offload._transfer.ticket import Ticket, packs
from pp_offload._transfer.tier import Tier


class Outgoing:
    """Places and stores groups.

    Args:
        tiers: In the order in which they are asked.
        copies: Whose lock is held, and whose listeners are told of each batch that is stored.
        poll: Lets go of what has ended, which may make room.
    """

    def __init__(self, tiers: Sequence[Tier], copies: Copies, poll: Callable[[], None]) -> None:
        self._tiers = tiers
        self._lock = copies.lock
        self._listeners = copies.listeners
        self._poll = poll

    def send(self, tickets: Sequence[Ticket]) -> int:
        """Place all of them, and store them. Not to be called with the lock held.

        Returns:
            Bytes.

        Raises:
            MemoryError: The last tier has no room either.
        """
        nbytes = 0
        gathered: dict[Tier, tuple[list[Ticket], list[Block]]] = {}
        for batch, room in packs(tickets):
            tier, blocks = when_finished(self._lock, partial(self._place, batch, room))
            if tier.is_gathering:
                found, known = gathered.setdefault(tier, ([], []))
                found += batch
                known += blocks
            else:
                nbytes += self._store(tier, batch, blocks)
        for tier, (found, known) in gathered.items():
            nbytes += self._store(tier, found, known)
        return nbytes

    def _place(self, batch: list[Ticket], nbytes: int) -> tuple[Tier, list[Block]]:
        """Room in the first tier that has some."""
        self._poll()
        *others, last = self._tiers
        for tier in others:
            with suppress(MemoryError):  # then the next one is asked
                return tier, tier.allocate(batch, nbytes)
        return last, last.allocate(batch, nbytes)

    def _store(self, tier: Tier, tickets: list[Ticket], blocks: list[Block]) -> int:
        with self._lock:
            nbytes = tier.store(tickets, blocks)
            for heard in self._listeners.offloaded:
                heard(tickets[0].label, nbytes)
        return nbytes
