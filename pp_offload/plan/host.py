"""Host memory as a tier, in numbers; see :mod:`pp_offload._transfer.host_tier`.

tier = HostTier(copies, memory)
blocks = tier.allocate(batch, 2**20)   # or raises MemoryError
tier.store(saved, blocks)
tier.load(saved, is_ahead=True)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pp_offload._memory.host import HostMemory
from pp_offload.plan.chunks import Block, Saved
from pp_offload.plan.copies import Copies


class NumberTier(Protocol):
    """A place for payloads, as ``Tier`` says it."""

    is_gathering: bool
    """Whether all of a group is stored at once."""

    @property
    def is_bringing(self) -> bool:
        """Whether something goes on to the device only in :meth:`poll`."""
        ...

    def allocate(self, batch: list[Saved], nbytes: int) -> list[Block]:
        """Room for payloads that share it."""
        ...

    def store(self, saved: Sequence[Saved], blocks: Sequence[Block]) -> int:
        """Queue copies of payloads to their places; how many bytes."""
        ...

    def load(self, saved: Sequence[Saved], *, is_ahead: bool) -> int:
        """Begin to bring payloads back; how many are on their way."""
        ...

    def poll(self) -> None:
        """Go on with what has ended meanwhile."""
        ...


class HostTier(NumberTier):
    """Keeps payloads in host memory.

    Args:
        copies: Queues the copies.
        host: The memory.
    """

    is_gathering = True
    is_bringing = False

    def __init__(self, copies: Copies, host: HostMemory) -> None:
        self._copies = copies
        self._host = host

    def allocate(self, batch: list[Saved], nbytes: int) -> list[Block]:
        return [Block(self._host.allocate(nbytes)).place(batch)]

    def store(self, saved: Sequence[Saved], blocks: Sequence[Block]) -> int:
        return self._copies.copy_to_host(saved, blocks)

    def load(self, saved: Sequence[Saved], *, is_ahead: bool) -> int:
        return self._copies.copy_to_device(saved)

    def poll(self) -> None:
        return
