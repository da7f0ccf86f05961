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
from pp_offload._transfer.flights import Flight
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
            if ticket.lent is None:
                raise
            return super().deliver(ticket)  # it could not be written, and is still there

    def _disk_copies(self, batch: list[Ticket], nbytes: int) -> list[HostCopy]:
        self._check_disk()
        return [
            place([ticket], HostCopy(None, self.disk.take(ticket.nbytes, 1))) for ticket in batch
        ]

    def _send(self, tickets: Sequence[Ticket], copies: Sequence[HostCopy]) -> int:
        sources = [ticket.source() for ticket in tickets]
        homes = self.homes(tickets)
        nbytes = sum(ticket.nbytes for ticket in tickets)
        flight = self.begin_flight(sources, copies, homes, nbytes)
        flight.offloaded = DiskEvent.all_of(list(map(self._write, copies, sources)))
        self._lend(tickets, sources, homes[0])
        self.counters.bytes_offloaded += nbytes
        return nbytes

    def _write(self, copy: HostCopy, source: Tensor) -> DiskEvent:
        assert copy.extent is not None, "not on disk"
        return self.disk.write(copy.extent, flat_bytes(source))

    def _fetch(self, tickets: Sequence[Ticket]) -> int:
        num, home = 0, self.backend.current_stream()
        for ticket in chain.from_iterable(self._distinct(tickets, home)):
            num += 1
            copy, shape = ticket.copy, ticket.host_bytes
            assert copy is not None and copy.extent is not None and shape is not None
            target = torch.empty_like(shape, device=self.backend.device)
            arrived = self._land(ticket, target, home)
            arrived.reloaded = self.disk.read(copy.extent, flat_bytes(target))
        return num

    def _arrive(self, flight: Flight) -> None:
        for ref in flight.copies:
            copy = ref()
            if copy is not None and copy.extent is not None and copy.extent.failure is not None:
                self._note(copy.extent.failure)
        super()._arrive(flight)
