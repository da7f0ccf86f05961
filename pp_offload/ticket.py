"""What moves: a payload's ticket, and the bytes of it that are kept off the device.

ticket = Ticket(transfer, "mlp", payload, members, storage)
transfer.offload([ticket])          # its copy is made
ticket.hand_over()                  # the saved tensors hold the ticket instead of their memory
tensor = transfer.deliver(ticket)   # when autograd asks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage

from pp_offload.backends import Event, Stream
from pp_offload.tiers.host import HostBuffer, HostTier, Part, room_for

PACK_BYTES = 2**20
"""Payloads that fit into so much together share a buffer, and give it back together."""

Watched = tuple[Tensor, int, int]
"""An alias of a saved tensor, its version when it was saved, and its first byte in the copy."""

Restore = Callable[[Tensor], Tensor]
"""Makes a saved tensor of the payload that holds it."""


class HostCopy:
    """A buffer in host memory, with the bytes of one payload or several small ones.

    It is given back when nobody refers to this object any more.
    """

    __slots__ = ("__weakref__", "buffer", "modified", "offloaded", "tier", "watched")

    def __init__(self, tier: HostTier, buffer: HostBuffer) -> None:
        self.tier = tier
        self.buffer = buffer
        self.offloaded: Event | None = None
        self.watched: list[Watched] | None = None
        self.modified: set[int] = set()

    def check_unmodified(self) -> None:
        """See NOTE [ Modified while queued ]."""
        for alias, version, begin in self.watched or ():
            if alias._version != version:
                self.modified.add(begin)

    def __del__(self) -> None:
        self.tier.give(self.buffer)


class Member(Protocol):
    """A saved tensor that a payload holds."""

    source: Tensor | None
    version: int
    ticket: Ticket | None


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
        storage: If the payload is all of one; then others may share the copy.
    """

    __slots__ = (
        "__weakref__",
        "begin",
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
        "storage",
        "transfer",
        "version",
    )

    def __init__(
        self,
        transfer: Mover,
        label: str,
        payload: Tensor,
        members: Sequence[Member],
        storage: UntypedStorage | None,
    ) -> None:
        self.transfer = transfer
        self.label = label
        self.payload: Tensor | None = payload
        self.members = members
        self.storage = storage
        self.nbytes = payload.nbytes
        self.num_waiting = len(members)
        self.copy: HostCopy | None = None
        self.begin = 0
        self.host_bytes: Tensor | None = None
        self.landed: Tensor | None = None
        self.reloaded: Event | None = None
        self.home: Stream | None = None
        self.version: int | None = None

    def source(self) -> Tensor:
        """The bytes to copy, contiguous. A gather runs on the compute stream."""
        payload = self.payload
        assert payload is not None, "offloaded twice"
        if self.storage is not None:
            return payload
        with torch.no_grad():
            return payload.contiguous()

    def part(self) -> Part:
        """What it needs of a buffer."""
        assert self.payload is not None, "offloaded twice"
        return self.payload.shape, self.payload.dtype

    def attach(self, copy: HostCopy, begin: int, place: Tensor) -> None:
        """Have the bytes in ``place``, shaped like the payload, from byte ``begin`` of ``copy``."""
        self.copy = copy
        self.begin = begin
        self.host_bytes = place

    def watch(self) -> None:
        """Have the copy watch its members until it was made."""
        copy, begin = self.copy, self.begin
        assert copy is not None, "it has no copy"
        if copy.watched is None:
            copy.watched = []
        for one in self.members:
            if one.source is not None:
                copy.watched.append((one.source, one.version, begin))

    def pieces(self) -> list[Tensor]:
        """Its bytes on the host as flat ``uint8`` tensors, where one cannot hold them."""
        assert self.copy is not None, "it has no copy"
        return self.copy.buffer.part(self.begin, self.nbytes)

    def hand_over(self) -> None:
        """The copy is queued: the members need their tensors no more."""
        for member in self.members:
            member.ticket = self
            member.source = None
        self.members = ()
        self.payload = self.storage = None

    def __del__(self) -> None:
        if self.landed is not None:
            self.transfer.abandon(self)


def packed(tickets: Sequence[Ticket], tier: HostTier) -> list[HostCopy]:
    """Give every ticket its place in host memory, small ones together.

    Returns:
        The copies, still without the bytes.

    Raises:
        MemoryError: The tier has no room.
    """
    copies: list[HostCopy] = []
    batch: list[Ticket] = []
    room = 0
    for ticket in tickets:
        if batch and room + ticket.nbytes > PACK_BYTES:
            copies.append(_pack(batch, room, tier))
            batch, room = [], 0
        batch.append(ticket)
        room += room_for(ticket.nbytes)
    copies.append(_pack(batch, room, tier))
    return copies


def _pack(batch: list[Ticket], room: int, tier: HostTier) -> HostCopy:
    buffer = tier.take(room if len(batch) > 1 else batch[0].nbytes)
    copy = HostCopy(tier, buffer)
    places = buffer.shaped([ticket.part() for ticket in batch])
    for ticket, (begin, place) in zip(batch, places, strict=True):
        ticket.attach(copy, begin, place)
    return copy
