"""Offloaded bytes in host memory: one copy there, one back.

tier = HostTier(copies, HostMemory(backend.allocate_host))
"""

from __future__ import annotations

from collections.abc import Sequence

from pp_offload._memory.host import HostMemory
from pp_offload._transfer.block import Block
from pp_offload._transfer.copies import Copies
from pp_offload._transfer.ticket import Ticket, place
from pp_offload._transfer.tier import Tier, TierStatistics


class HostTier(Tier):
    """Keeps bytes in host memory.

    Args:
        copies: Queues the copies.
        host: The memory.
    """

    name = "host"
    is_gathering = True

    def __init__(self, copies: Copies, host: HostMemory) -> None:
        self.host = host
        self._copies = copies

    def allocate(self, batch: list[Ticket], nbytes: int) -> list[Block]:
        """One buffer for the batch."""
        return [place(batch, Block(self, self.host.allocate(nbytes, len(batch))))]

    def store(self, tickets: Sequence[Ticket], blocks: Sequence[Block]) -> int:
        return self._copies.copy_to_host(tickets, blocks)

    def load(self, tickets: Sequence[Ticket], *, is_ahead: bool) -> int:
        return self._copies.copy_to_device(tickets)

    def statistics(self) -> TierStatistics:
        host = self.host.statistics()
        return TierStatistics(num_payloads=host.num_payloads, host=host)

    def host_bytes_in_use(self) -> int:
        return self.host.bytes_in_use()

    def compact(self) -> None:
        self.host.compact()

    def release_idle(self) -> None:
        self.host.release_idle()

    def close(self) -> None:
        self.host.close()
