"""The disk tier where the device is the host: tensors are written and read as they are.

No copy is made in memory, so what is offloaded really leaves it.

    write-behind  a thread writes the tensor, which is kept until then, and taken back if needed
    read-ahead    a thread reads into a new tensor, which nobody sees before its event
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from pp_offload._memory.disk import DiskEvent
from pp_offload._transfer.disk_transfer import DiskTransferEngine
from pp_offload._transfer.pending_offloads import PendingOffload
from pp_offload._transfer.tensors import flat_bytes
from pp_offload._transfer.ticket import HostCopy, Ticket, place
from pp_offload.errors import DiskTierError


class DirectDiskEngine(DiskTransferEngine):
    """Writes tensors of the host to disk, without another copy in memory."""

    def deliver(self, ticket: Ticket) -> Tensor:
        """The payload, ready to use.

        Raises:
            DiskTierError: It cannot be read back.
            SavedTensorModifiedError: It was changed in place before it was written.
        """
        try:
            return super().deliver(ticket)
        except DiskTierError:
            self._give_up([ticket])
            if ticket.in_flight_source is None:
                raise
            return super().deliver(ticket)  # it could not be written, and is still there

    def _disk_copies(self, batch: list[Ticket], nbytes: int) -> list[HostCopy]:
        self._check_disk()
        return [
            place([ticket], HostCopy(None, self.disk.allocate(ticket.nbytes, 1)))
            for ticket in batch
        ]

    def _send(self, tickets: Sequence[Ticket], copies: Sequence[HostCopy]) -> int:
        sources = [ticket.source() for ticket in tickets]
        streams = self.compute_streams(tickets)
        nbytes = sum(ticket.nbytes for ticket in tickets)
        pending = self.begin_offload(sources, copies, streams, nbytes)
        pending.offloaded = DiskEvent.all_of(list(map(self._write, copies, sources)))
        self._keep_sources(tickets, sources, streams[0])
        self.counters.bytes_offloaded += nbytes
        return nbytes

    def _write(self, copy: HostCopy, source: Tensor) -> DiskEvent:
        assert copy.extent is not None, "not on disk"
        return self.disk.write(copy.extent, flat_bytes(source))

    def _fetch(self, tickets: Sequence[Ticket]) -> int:
        num, stream = 0, self.backend.current_stream()
        for ticket in chain.from_iterable(self._distinct(tickets, stream)):
            num += 1
            copy, shape = ticket.copy, ticket.host_bytes
            assert copy is not None and copy.extent is not None and shape is not None
            target = torch.empty_like(shape, device=self.backend.device)
            device_copy = self._begin_reload(ticket, target, stream)
            device_copy.reloaded = self.disk.read(copy.extent, flat_bytes(target))
        return num

    def _finish(self, pending: PendingOffload) -> None:
        for ref in pending.copies:
            copy = ref()
            if copy is not None and copy.extent is not None and copy.extent.failure is not None:
                self._note(copy.extent.failure)
        super()._finish(pending)
