"""A payload that is on the device again, or on its way there."""

from __future__ import annotations

import weakref

from torch import Tensor

from pp_offload._transfer.block import AnyTicket
from pp_offload.backends import Event, Stream


class Arrival:
    """Device memory that one event is behind: of payloads that are copied together.

    Args:
        stream: The compute stream the memory was allocated on.

    Attributes:
        reloaded: Behind the copies; None until they are queued.
        is_there: Whether that stream has waited for them.
    """

    __slots__ = ("is_there", "reloaded", "stream")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.reloaded: Event | None = None
        self.is_there = False


class Reload(weakref.ref[AnyTicket]):
    """A payload that is on the device or on its way there, until its ticket is used up or gone.

    The engine holds it as well as the ticket: the memory must outlive the copy into it, even if the
    ticket does not. See NOTE [ Nobody is called ].
    """

    __slots__ = ("arrival", "is_used", "lead", "nbytes", "num_users", "tensor", "version")

    # By identity: a ticket has one after the other, and references to the same object are equal.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    arrival: Arrival | None
    """None while a disk is read ahead of the copy."""

    tensor: Tensor | None
    """The memory, shaped as the payload of the ticket it was allocated for."""

    lead: Reload | None
    """That of another ticket with the same bytes, whose memory this one uses."""

    num_users: int
    """Reloads that use its memory, counting itself until it is given up."""

    version: int | None
    """Of the memory when it was first given out."""

    nbytes: int

    is_used: bool
    """Whether it was given out for its ticket."""

    def is_for(self, live: Stream) -> bool:
        """Whether the live stream may use or wait for its memory: no interrupt came before the
        event was known.
        """
        arrival = self.arrival
        if arrival is None or arrival.stream != live:
            return False
        return arrival.is_there or arrival.reloaded is not None

    @property
    def is_as_it_came(self) -> bool:
        """Whether nobody who was given the memory changed it in place."""
        version, tensor = (self.lead or self).version, self.tensor
        return version is None or tensor is None or version == tensor._version
