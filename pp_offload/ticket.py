"""What moves: a payload's ticket, and the bytes of it that are kept off the device.

    ticket = Ticket(transfer, "mlp", payload, members, storage)
    transfer.offload([ticket])          # its copy is made
    ticket.hand_over()                  # the saved tensors hold the ticket instead of their memory
    tensor = transfer.deliver(ticket)   # when autograd asks

NOTE [ Uses ]
    ``num_waiting`` is how often autograd is expected to ask for a payload before its memory on the
    device is let go: once for each saved tensor it holds, unless a backward in two parts is known
    to ask otherwise (``split.py``). It steers memory and prefetch; no value depends on it. Asked
    for more often, as in a second backward, the payload is brought again, for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage

from pp_offload.backends import Event, Stream
from pp_offload.tiers.disk import DiskEvent, DiskExtent
from pp_offload.tiers.host import HostBuffer, HostTier, Part, Place, room_for

PACK_BYTES = 2**20
"""Payloads that fit into so much together share a buffer, and give it back together."""

Watched = tuple[Tensor, int, int]
"""An alias of a saved tensor, its version when it was saved, and its first byte in the copy."""

Restore = Callable[[Tensor], Tensor]
"""Makes a saved tensor of the payload that holds it."""


class HostCopy:
    """Bytes of one payload, or of several small ones, in host memory, on disk, or in both.

    The memory is given back when nobody refers to this object any more.

    Args:
        tier: Where the buffer came from.
        buffer: Host memory for the bytes, or None.
        extent: Room on disk for them, or None.
    """

    __slots__ = (
        "__weakref__",
        "buffer",
        "extent",
        "home",
        "lent",
        "modified",
        "offloaded",
        "reading",
        "tier",
        "watched",
    )

    def __init__(
        self,
        tier: HostTier | None,
        buffer: HostBuffer | None,
        extent: DiskExtent | None = None,
    ) -> None:
        self.tier = tier
        self.buffer = buffer
        self.extent = extent
        self.offloaded: Event | None = None
        self.reading: DiskEvent | None = None
        self.home: Stream | None = None
        self.lent: dict[int, Tensor] = {}
        self.watched: list[Watched] | None = None
        self.modified: set[int] = set()

    def places(self, parts: list[Part]) -> list[Place]:
        """Where tensors lie one behind the other; without bytes if those may change places."""
        if self.extent is None and self.buffer is not None:
            return self.buffer.shaped(parts)
        begins = accumulate((room_for(n.numel() * t.itemsize) for n, t in parts), initial=0)
        shapes = (torch.empty(size, dtype=dtype, device="meta") for size, dtype in parts)
        return list(zip(begins, shapes, strict=False))

    def lend(self, begin: int, source: Tensor, home: Stream) -> None:
        """``source`` is there until the copy was made, and may be had back from stream ``home``."""
        self.lent[begin] = source
        self.home = home

    def arrive(self) -> None:
        """The copy was made; or the disk failed, and then what was lent is all there is."""
        self.check_unmodified()
        self.watched = None
        if self.buffer is None and self.extent is not None and self.extent.failure is not None:
            self.drop_extent()
        else:
            self.lent.clear()

    def drop_buffer(self) -> None:
        """The bytes are on disk alone."""
        buffer, self.buffer = self.buffer, None
        if buffer is not None and self.tier is not None:
            self.tier.give(buffer)

    def drop_extent(self) -> None:
        """The bytes are not on disk."""
        extent, self.extent = self.extent, None
        if extent is not None:
            extent.tier.give(extent)

    def check_unmodified(self) -> None:
        """See NOTE [ Modified while queued ]."""
        for alias, version, begin in self.watched or ():
            if alias._version != version:
                self.modified.add(begin)

    def __del__(self) -> None:
        self.drop_buffer()
        if self.extent is not None:
            self.drop_extent()


class Member(Protocol):
    """A saved tensor that a payload holds."""

    source: Tensor | None
    version: int
    home: Stream | None
    pending: Tensor | None
    is_part: bool
    ticket: Ticket | None


class Mover(Protocol):
    """What a ticket needs of the transfer engine."""

    @property
    def landed_bytes(self) -> int:
        """Bytes on the device that nobody has used yet, or on their way there."""
        ...

    @property
    def refill_below_bytes(self) -> int:
        """Below so many, more should be brought."""
        ...

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
        "num_members",
        "num_waiting",
        "payload",
        "reading",
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
        self.num_members = self.num_waiting = len(members)
        self.copy: HostCopy | None = None
        self.begin = 0
        self.host_bytes: Tensor | None = None
        self.landed: Tensor | None = None
        self.reading = False
        self.reloaded: Event | None = None
        self.home: Stream | None = None
        self.version: int | None = None

    @property
    def is_coming(self) -> bool:
        """Whether the payload is on the device, or on its way there from the disk."""
        return self.landed is not None or self.reading

    @property
    def lent(self) -> Tensor | None:
        """The source of a copy that has not been made yet."""
        return None if self.copy is None else self.copy.lent.get(self.begin)

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
        assert self.copy is not None and self.copy.buffer is not None, "not in host memory"
        return self.copy.buffer.part(self.begin, self.nbytes)

    def hand_over(self) -> None:
        """The copy is queued: the members need their tensors no more."""
        for member in self.members:
            member.ticket = self
            member.source = member.pending = None
        self.members = ()
        self.payload = self.storage = None

    def __del__(self) -> None:
        if self.is_coming:
            self.transfer.abandon(self)


def packs(tickets: Sequence[Ticket]) -> Iterator[tuple[list[Ticket], int]]:
    """Tickets that share a copy, and the bytes it takes: small ones together, others alone."""
    batch: list[Ticket] = []
    room = 0
    for ticket in tickets:
        if batch and room + ticket.nbytes > PACK_BYTES:
            yield batch, _trimmed(batch, room)
            batch, room = [], 0
        batch.append(ticket)
        room += room_for(ticket.nbytes)
    yield batch, _trimmed(batch, room)


def _trimmed(batch: list[Ticket], room: int) -> int:
    return room if len(batch) > 1 else batch[0].nbytes


def place(batch: list[Ticket], copy: HostCopy) -> HostCopy:
    """Give every ticket its place in ``copy``, which it gives back."""
    places = copy.places([ticket.part() for ticket in batch])
    for ticket, (begin, tensor) in zip(batch, places, strict=True):
        ticket.attach(copy, begin, tensor)
    return copy
