"""What both ways to the disk share: the file, its blocks, its failures.

NOTE [ Two ways to the disk ]
    Where the device is the host, threads write a tensor as it is and read into a new one: see
    ``disk_direct.py``. Elsewhere its bytes pass through staging buffers: see ``disk_staged.py``.

NOTE [ When the disk fails ]
    What could not be written stays where it is, tensor or buffer, and later groups stay on the
    device until the next step tries again. A payload that cannot be read back raises when it is
    asked for; asked for again, it is read again.
"""

from __future__ import annotations

import logging
from itertools import accumulate
from typing import cast

from pp_offload._memory.buffers import Loan, Place, Spec, no_address, room_for
from pp_offload._memory.disk import NO_EXTENT, DiskEvent, DiskExtent, DiskFile
from pp_offload._transfer.block import Block, BlockState
from pp_offload._transfer.copies import Copies
from pp_offload._transfer.ticket import Ticket
from pp_offload._transfer.tier import Tier, TierStatistics
from pp_offload.errors import DiskTierError

logger = logging.getLogger(__name__)


class OnDisk(Tier):
    """Keeps bytes on disk. See NOTE [ When the disk fails ].

    Args:
        copies: Queues copies, and keeps alive what threads write or read into.
        disk: Where the bytes go.
    """

    name = "disk"
    is_gathering = False

    def __init__(self, copies: Copies, disk: DiskFile) -> None:
        self.disk = disk
        self._copies = copies
        self._failure: DiskTierError | None = None
        """Of a write in this step."""

        self._has_warned = False

    def may_capture(self, block: Block | None = None) -> bool:
        """True only for what could not be written, which is still in memory."""
        return block is not None and block.state is BlockState.REFUSED

    def check_disk(self) -> None:
        """Raise MemoryError if the disk failed in this step."""
        if self._failure is not None:
            raise MemoryError(str(self._failure)) from self._failure

    def note_written(self, block: DiskBlock) -> None:
        """If it was being written, the write has ended, well or not."""
        if block.state is not BlockState.WRITING:
            return
        failure = block.extent.failure
        if failure is None:
            block.move_to(BlockState.ON_DISK)
            return
        self._failure = failure
        block.move_to(BlockState.REFUSED)
        block.extent = NO_EXTENT
        logger.log(
            logging.DEBUG if self._has_warned else logging.WARNING,
            "offloaded activations could not be written and stay in memory, as will what follows "
            "in this step; from now on without a warning: %s",
            str(failure),
        )
        self._has_warned = True

    def statistics(self) -> TierStatistics:
        disk = self.disk.statistics()
        return TierStatistics(num_payloads=disk.num_payloads, disk=disk)

    def compact(self) -> None:
        """Have the next step try the disk again."""
        self._failure = None

    def retire(self) -> None:
        """Drop the file, unless saved tensors need it; then it goes with the last of them."""
        if self.disk.statistics().in_use == 0:
            self.disk.close()

    def close(self) -> None:
        self.disk.close()


class DiskBlock(Block):
    """A block with room on disk, which is given back when nobody refers to it any more.

    Args:
        tier: Stores the bytes, and brings them back.
        extent: The room; that of nothing once the disk has refused the bytes.
        loan: Host memory that they pass through, or None.

    Attributes:
        reading: The end of the read into the buffer.
    """

    __slots__ = ("extent", "reading")

    def __init__(self, tier: OnDisk, extent: DiskExtent, loan: Loan | None = None) -> None:
        super().__init__(tier, loan)
        self.extent = extent
        self.reading = DiskEvent()

    @classmethod
    def of(cls, ticket: Ticket) -> DiskBlock:
        """Where the payload of a ticket is that a tier on disk has stored."""
        return cast(DiskBlock, ticket.block)

    def places(self, parts: list[Spec]) -> list[Place]:
        """Without addresses: they come back through another buffer."""
        begins = accumulate((room_for(n.numel() * t.itemsize) for n, t in parts), initial=0)
        places = [no_address(size, dtype) for size, dtype in parts]
        return list(zip(begins, places, strict=False))
