"""The checks of :mod:`pp_offload._core.verify`, told of by this engine."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from pp_offload._core import verify
from pp_offload._core.verify import check_same, checksum_of
from pp_offload._transfer.listeners import Listener
from pp_offload._transfer.ticket import Ticket
from pp_offload.backends import Backend


class Verifier(verify.Verifier, Listener):
    """Looks at what leaves an engine and what it gives back.

    Args:
        backend: The engine's.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend

    def delivered(self, ticket: Ticket, tensor: Tensor) -> None:
        if ticket.checksum is None or self._backend.is_capturing:
            return  # in a capture nothing is there to compare
        what = f"a tensor of group '{ticket.label}' with payload shape {tuple(tensor.shape)}"
        check_same(tensor, ticket.checksum, f"{what} came back")

    def leaving(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            ticket.checksum = checksum_of(ticket.source())

    def left(self, tickets: Sequence[Ticket]) -> None:
        """Watch storages that should go."""
        for ticket in tickets:
            if ticket.storage is not None:  # others may need the storage of a view
                self._watched.append((ticket.label, ticket.nbytes, weakref.ref(ticket.storage)))
