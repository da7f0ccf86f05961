"""The disk as a tier, in numbers: the engine's own tier, over a file that is a clock alone.

Payloads of a tape stand for its tickets, and blocks of numbers for its blocks: they have what it
asks of them under the same names. So when a buffer is written, read ahead or waited for is not told
here a second time.

    file = NumberFile(hardware)
    file.begin_step(device.host, 0.0)
    tier = disk_tier(copies, file, staging)
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, cast

from pp_offload._memory.arena import Range
from pp_offload._memory.buffers import HostBuffer, Loan
from pp_offload._memory.disk import DiskEvent, DiskExtent
from pp_offload._memory.host import HostMemory
from pp_offload._transfer.block import MOVES, BlockState
from pp_offload._transfer.disk_staged import StagedDisk
from pp_offload.backends import Event
from pp_offload.plan.chunks import Block, Saved
from pp_offload.plan.copies import Copies
from pp_offload.plan.host import NumberTier
from pp_offload.simulate.clocks import HostClock
from pp_offload.simulate.disk import ClockedWork, DiskClock, VirtualRange
from pp_offload.simulate.hardware import Hardware


class NumberFile:
    """A file of which only the times of reads and writes are known, over all steps of a rank.

    Args:
        hardware: Has the disk's rates.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._clock = DiskClock(HostClock(hardware))
        self._queued: deque[ClockedWork] = deque()

    def __deepcopy__(self, memo: dict[int, Any]) -> NumberFile:
        """One whose work goes on by itself; clocks of a step that is over are not copied."""
        other = copy.copy(self)
        other._queued = copy.deepcopy(self._queued, memo)
        return other

    def begin_step(self, host: HostClock, begin_s: float) -> None:
        """Go on by another clock, which is at 0 when the one so far is at ``begin_s``.

        What was written for nobody may take longer than the step that has queued it.
        """
        before, self._clock = self._clock, DiskClock(host)
        self._clock.free_at_s = max(0.0, before.free_at_s - begin_s)
        self._forget_ended()
        for work in self._queued:
            work.host, work.end_s = host, work.end_s - begin_s

    def allocate(self, nbytes: int, num_payloads: int) -> DiskExtent:
        """An extent; a disk has no end."""
        return DiskExtent(VirtualRange(nbytes, Range(0, 0, 0, 0), 0))

    def write(self, extent: DiskExtent, data: object, ended: DiskEvent) -> None:
        """Queue writing it."""
        self._queue(self._clock.queue(extent, writes=True, ended=ended))

    def read(
        self, extent: DiskExtent, target: object, ended: DiskEvent, after: Sequence[Event]
    ) -> None:
        """Queue reading it, behind the earlier uses of the target."""
        self._queue(self._clock.queue(extent, writes=False, ended=ended, after=after))

    def _queue(self, work: ClockedWork) -> None:
        self._forget_ended()
        self._queued.append(work)

    def _forget_ended(self) -> None:
        while self._queued and self._queued[0].done():
            self._queued.popleft()


class DiskBlock(Block):
    """One with room on disk; see that of ``_transfer.on_disk``.

    Args:
        extent: The room.
        loan: Host memory that its bytes pass through.
    """

    __slots__ = ("extent", "reading", "state")

    def __init__(self, extent: DiskExtent, loan: Loan) -> None:
        super().__init__(loan)
        self.extent = extent
        self.reading = DiskEvent()
        self.state = BlockState.ON_HOST  # its copy there is queued next

    def move_to(self, state: BlockState) -> None:
        """As the method of ``_transfer.block.Block``."""
        assert state in MOVES[self.state], f"{self.state} to {state}"
        self.state = state

    @property
    def buffer(self) -> HostBuffer | None:
        """Where its bytes are in host memory."""
        return None if self.loan is None else self.loan.buffer


class Disk(StagedDisk):
    """The engine's own, but for what it would make of tickets."""

    def _block(self, batch: Any, extent: DiskExtent, loan: Loan) -> Any:
        return DiskBlock(extent, loan).place(batch)

    def _all_of(self, block: Any, asked: Iterable[Any]) -> list[Any]:
        mates: Iterable[Saved] = chain(block.placed, *block.shared.values())
        more = [one for one in mates if one.block is block and one.num_waiting > 0]
        return list(dict.fromkeys([*asked, *(one for one in more if one.memory is None)]))


def disk_tier(copies: Copies, file: NumberFile, staging: HostMemory) -> NumberTier:
    """A tier over that file, through buffers of this memory."""
    return cast(NumberTier, Disk(cast(Any, copies), cast(Any, file), staging))
