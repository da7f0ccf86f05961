"""What moves: a payload's ticket, and the bytes of it that are kept off the device.

ticket = Ticket(transfer, "mlp", payload, members, storage_key)
transfer.offload([ticket])          # its copy is made
ticket.hand_over()                  # the saved tensors hold the ticket instead of their memory
tensor = transfer.deliver(ticket)   # when autograd asks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pp_offload.backends import Event, Stream
from pp_offload.tiers.host import HostBuffer, HostTier

Watched = tuple[Tensor, int]
"""An alias of a saved tensor, and its version when autograd saved it."""

Restore = Callable[[Tensor], Tensor]
"""Makes a saved tensor of the payload that holds it."""


class HostCopy:
    """Bytes in host memory, for as long as anybody refers to this object."""

    __slots__ = ("__weakref__", "buffer", "is_modified", "offloaded", "tier", "watched")

    def __init__(self, tier: HostTier, buffer: HostBuffer) -> None:
        self.tier = tier
        self.buffer = buffer
        self.offloaded: Event | None = None
        self.watched: list[Watched] | None = None
        self.is_modified = False

    def check_unmodified(self) -> None:
        """See NOTE [ Modified while queued ]."""
        for alias, version in self.watched or ():
            if alias._version != version:
                self.is_modified = True

    def __del__(self) -> None:
        self.tier.give(self.buffer)


class Member(Protocol):
    """A saved tensor that a payload holds."""

    source: Tensor | None
    restore: Restore | None
    version: int

    def check_unmodified(self) -> None:
        """Raise if it was changed in place since it was saved."""
        ...

    def entrust(self, ticket: Ticket) -> None:
        """Leave the bytes to ``ticket``."""
        ...


class Mover(Protocol):
    """What a ticket needs of the transfer engine."""

    landed_bytes: int
    refill_below_bytes: int

    def deliver(self, ticket: Ticket) -> Tensor:
        """The payload on the device."""
        ...

    def abandon(self, ticket: Ticket) -> None:
        """Give up a payload nobody will use."""
        ...


class Ticket:
    """One payload's way to the host and back.

    Args:
        transfer: Moves it.
        label: Its group, for messages.
        payload: Device memory to copy: a whole storage, or a view to be gathered.
        members: The saved tensors these bytes hold; each knows how it is made of them.
        storage_key: Of the storage, if the payload is all of one; then others may share the copy.
    """

    __slots__ = (
        "__weakref__",
        "copy",
        "home",
        "host_bytes",
        "label",
        "landed",
        "members",
        "nbytes",
        "num_waiting",
        "payload",
        "reloaded",
        "storage_key",
        "transfer",
    )

    def __init__(
        self,
        transfer: Mover,
        label: str,
        payload: Tensor,
        members: Sequence[Member],
        storage_key: int | None,
    ) -> None:
        self.transfer = transfer
        self.label = label
        self.payload: Tensor | None = payload
        self.members = members
        self.storage_key = storage_key
        self.nbytes = payload.nbytes
        self.num_waiting = len(members)
        self.copy: HostCopy | None = None
        self.host_bytes: Tensor | None = None
        self.landed: Tensor | None = None
        self.reloaded: Event | None = None
        self.home: Stream | None = None

    def source(self) -> Tensor:
        """The bytes to copy, contiguous. A gather runs on the compute stream."""
        payload = self.payload
        assert payload is not None, "offloaded twice"
        if self.storage_key is not None:
            return payload
        with torch.no_grad():
            return payload.contiguous()

    def attach(self, copy: HostCopy) -> Tensor:
        """Have the bytes in ``copy``; gives them back, shaped like the payload."""
        assert self.payload is not None, "attached twice"
        self.copy = copy
        self.host_bytes = copy.buffer.shaped(self.payload.shape, self.payload.dtype)
        return self.host_bytes

    def watched(self) -> list[Watched]:
        """Aliases whose version tells whether the bytes are still those that were saved."""
        return [(one.source, one.version) for one in self.members if one.source is not None]

    def hand_over(self) -> None:
        """The copy is queued: the members need their tensors no more."""
        members, self.members, self.payload = self.members, (), None
        for member in members:
            member.entrust(self)

    def __del__(self) -> None:
        if self.landed is not None:
            self.transfer.abandon(self)
