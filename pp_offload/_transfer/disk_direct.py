"""The disk tier where the device is the host: tensors are written and read as they are.

No copy is made in memory, so what is offloaded really leaves it.

    write-behind  a thread writes the tensor, which is kept until then, and taken back if needed
    read-ahead    a thread reads into a new tensor, which nobody sees before its event
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pp_offload._core.tensors import flat_bytes
from pp_offload._memory.disk import DiskEvent
from pp_offload._transfer.block import Block, BlockState
from pp_offload._transfer.on_disk import DiskBlock, OnDisk
from pp_offload._transfer.ticket import Ticket, place
from pp_offload.backends import Stream


class DirectDisk(OnDisk):
    """Writes tensors of the host to disk, without another copy in memory."""

    def allocate(self, batch: list[Ticket], nbytes: int) -> list[Block]:
        """An extent for each ticket.

        Raises:
            MemoryError: The disk failed in this step.
        """
        self.check_disk()
        return [
            place([ticket], DiskBlock(self, self.disk.allocate(ticket.nbytes))) for ticket in batch
        ]

    def store(self, tickets: Sequence[Ticket], blocks: Sequence[Block]) -> int:
        """Have threads write the tensors."""
        sources = [ticket.source() for ticket in tickets]
        streams = self._copies.compute_streams(tickets)
        nbytes = sum(ticket.nbytes for ticket in tickets)
        pending = self._copies.in_flight.begin(sources, blocks, streams, nbytes)
        pending.offloaded = DiskEvent.all_of(list(map(self._write, tickets, sources)))
        self._copies.keep_sources(tickets, sources, streams[0])
        return nbytes

    def _write(self, ticket: Ticket, source: Tensor) -> DiskEvent:
        block = DiskBlock.of(ticket)
        block.move_to(BlockState.WRITING)
        return self.disk.write(block.extent, flat_bytes(source))

    def has_stored(self, block: Block) -> bool:
        """Whether the bytes were written. If not, their source is kept."""
        if isinstance(block, DiskBlock):
            self.note_written(block)
        return block.state is BlockState.ON_DISK

    def load(self, tickets: Sequence[Ticket], *, is_ahead: bool) -> int:
        """Have threads read into new tensors, but for payloads that were never written."""
        left = [one for one in tickets if one.device_tensor is None]
        written = [one for one in left if one.block.state is not BlockState.REFUSED]
        return self._copies.bring(written, self._read)

    def _read(self, tickets: Sequence[Ticket], stream: Stream) -> None:
        for ticket in tickets:
            target = torch.empty_like(ticket.host_bytes, device=self._copies.backend.device)
            arrival = self._copies.reloads.begin([ticket], [target], stream)
            arrival.reloaded = self.disk.read(DiskBlock.of(ticket).extent, flat_bytes(target))
