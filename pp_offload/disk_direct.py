"""The disk tier where the device is the host: tensors are written and read as they are.

No copy is made in memory, so what is offloaded really leaves it.

    write-behind  a thread writes the tensor, which is kept until then, and taken back if needed
    read-ahead    a thread reads into a new tensor, which nobody sees before its event
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pp_offload.disk_transfer import DiskTransferEngine
from pp_offload.errors import DiskTierError
from pp_offload.tensors import flat_bytes
from pp_offload.ticket import HostCopy, Ticket, place
from pp_offload.tiers.disk import DiskEvent
from pp_offload.transfer import Flight


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
            self._drop_landed(ticket)
            if ticket.lent is None:
                raise
            return super().deliver(ticket)  # it could not be written, and is still there

    def _disk_copies(self, batch: list[Ticket], nbytes: int) -> list[HostCopy]:
        self._check_disk()
        return [
            place([ticket], HostCopy(None, None, self.disk.take(ticket.nbytes, 1)))
            for ticket in batch
        ]

    def _send(self, tickets: Sequence[Ticket], copies: Sequence[HostCopy]) -> int:
        sources: list[Tensor] = []
        events: list[DiskEvent] = []
        for ticket, copy in zip(tickets, copies, strict=True):
            source = ticket.source()
            sources.append(source)
            assert copy.extent is not None
            events.append(self.disk.write(copy.extent, flat_bytes(source)))
        homes = self.homes(tickets)
        nbytes = sum(ticket.nbytes for ticket in tickets)
        self._depart(tickets, copies, sources, DiskEvent.all_of(events), homes, nbytes)
        return nbytes

    def _fetch(self, tickets: Sequence[Ticket]) -> None:
        home = self.backend.current_stream()
        for ticket in tickets:
            copy, shape = ticket.copy, ticket.host_bytes
            assert copy is not None and copy.extent is not None and shape is not None
            target = torch.empty_like(shape, device=self.backend.device)
            self._land([ticket], [target], self.disk.read(copy.extent, flat_bytes(target)), home)

    def _arrive(self, flight: Flight) -> None:
        for ref in flight.copies:
            copy = ref()
            if copy is not None and copy.extent is not None and copy.extent.failure is not None:
                self._note(copy.extent.failure)
        super()._arrive(flight)
