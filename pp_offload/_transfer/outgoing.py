"""A group on its way to the tiers: each batch goes to the first one with room.

outgoing = Outgoing(tickets, tiers, poll, listeners)
nbytes = when_finished(lock, outgoing.go_on)   # which is called again after each wait
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from pp_offload._transfer.block import Block
from pp_offload._transfer.listeners import Listeners
from pp_offload._transfer.ticket import Ticket, packs
from pp_offload._transfer.tier import Tier


class Outgoing:
    """Places and stores a group; called again after a wait, it goes on where it was.

    Args:
        tickets: At least one, none offloaded before.
        tiers: In the order in which they are asked.
        poll: Lets go of what has ended, which may make room.
        listeners: Told of each batch that is stored, whichever tier stores it.
    """

    def __init__(
        self,
        tickets: Sequence[Ticket],
        tiers: Sequence[Tier],
        poll: Callable[[], None],
        listeners: Listeners,
    ) -> None:
        self._tiers = tiers
        self._poll = poll
        self._listeners = listeners
        self._left = deque(packs(tickets))
        self._asked = 0
        self._gathered: dict[int, tuple[list[Ticket], list[Block]]] = {}
        self._nbytes = 0

    def go_on(self) -> int:
        """Place what is left, and store it.

        Returns:
            Bytes of all of it.

        Raises:
            MemoryError: The last tier has no room either.
            Unfinished: Something has to end first.
        """
        self._poll()
        while self._left:
            batch, nbytes = self._left[0]
            tier, blocks = self._room_for(batch, nbytes)
            if tier.is_gathering:
                self._gather(batch, blocks)
            else:
                self._store(tier, batch, blocks)
            self._left.popleft()
            self._asked = 0
        for number, (tickets, blocks) in self._gathered.items():
            self._store(self._tiers[number], tickets, blocks)
        return self._nbytes

    def _store(self, tier: Tier, tickets: list[Ticket], blocks: list[Block]) -> None:
        nbytes = tier.store(tickets, blocks)
        self._nbytes += nbytes
        for heard in self._listeners.offloaded:
            heard(tickets[0].label, nbytes)

    def _gather(self, batch: list[Ticket], blocks: list[Block]) -> None:
        tickets, known = self._gathered.setdefault(self._asked, ([], []))
        tickets += batch
        known += blocks

    def _room_for(self, batch: list[Ticket], nbytes: int) -> tuple[Tier, list[Block]]:
        """Room in the first tier that has some; one that refused this batch is not asked again."""
        while True:
            tier = self._tiers[self._asked]
            if not tier.is_gathering:
                self._poll()  # what was stored meanwhile may have made room
            try:
                return tier, tier.allocate(batch, nbytes)
            except MemoryError:
                if self._asked + 1 == len(self._tiers):
                    raise
                self._asked += 1
