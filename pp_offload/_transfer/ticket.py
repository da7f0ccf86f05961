"""What moves: a payload's ticket, and the bytes of it that are kept off the device.

    ticket = Ticket(transfer, "mlp", payload, members, storage)
    transfer.offload([ticket])          # its copy is queued
    ticket.hand_over()                  # the saved tensors hold the ticket instead of their memory
    tensor = transfer.deliver(ticket)   # when autograd asks

NOTE [ Uses ]
    ``num_waiting`` is how often autograd is expected to ask for a payload before its memory on the
    device is let go: once for each saved tensor it holds, unless a backward in two parts is known
    to ask otherwise (``split_backward.py``). It steers memory and prefetch; no value depends on it.
    If autograd asks more often, as in a second backward, the payload is brought again, for all of
    its saved tensors.

NOTE [ Nobody is called ]
    When autograd frees a node, no Python code of ours may run: Python would run a pending signal
    handler inside it, and what that raises in a destructor, or in the callback of a weak reference,
    is printed and lost. So a weak reference tells that a ticket is gone: its callback is the
    ``append`` of a queue, which is C; the engine looks at the queue when it is called next.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage

from pp_offload._memory.buffers import HostBuffer, Loan, Place, Spec, room_for
from pp_offload._memory.disk import DiskEvent, DiskExtent
from pp_offload._transfer.tensors import flat_bytes
from pp_offload.backends import Event, Stream

PACK_BYTES = 2**20
"""Payloads that fit into so much together share a buffer, and give it back together."""

Watched = tuple[Tensor, int]
"""An alias of a saved tensor, and its version when it was saved."""

Restore = Callable[[Tensor], Tensor]
"""Makes a saved tensor of the payload that holds it."""


class Holder(Protocol):
    """What a copy needs of the tier that has its bytes: see ``tier.py``."""

    name: str
    """Its name in the options and in messages."""

    def load(self, tickets: Sequence[Ticket], *, is_ahead: bool) -> int:
        """Begin to bring payloads back; returns how many."""
        ...

    def has_stored(self, copy: HostCopy) -> bool:
        """Whether the bytes were stored. Called when the copy or the write has ended."""
        ...

    def may_capture(self, copy: HostCopy | None = None) -> bool:
        """Whether a graph may capture what moves the bytes of ``copy``, or of one to be made."""
        ...


class HostCopy:
    """Bytes of one payload, or of several small ones, in host memory, on disk, or in both.

    It holds the loan and the extent, so both are given back when nobody refers to it any more. It
    has no destructor: see ``_memory/loans.py``.

    Args:
        tier: Stores the bytes, and brings them back.
        loan: Host memory for the bytes, or None.
        extent: Room on disk for them, or None.

    Attributes:
        tickets: Those whose bytes it holds, by their first byte, in the order they were saved.
            Several have the same first byte if groups saved the same tensor.
        watched: The saved tensors of each payload, by its first byte, until the copy was made. A
            pack holds thousands, so a payload that is asked for before then is checked alone.
    """

    __slots__ = (
        "__weakref__",
        "extent",
        "stream",
        "in_flight_sources",
        "loan",
        "modified",
        "offloaded",
        "reading",
        "tickets",
        "tier",
        "watched",
    )

    def __init__(
        self, tier: Holder, loan: Loan | None = None, extent: DiskExtent | None = None
    ) -> None:
        self.tier = tier
        self.loan = loan
        self.extent = extent
        self.offloaded: Event | None = None
        self.reading: DiskEvent | None = None
        self.stream: Stream | None = None
        self.in_flight_sources: dict[int, Tensor] = {}
        self.watched: dict[int, list[Watched]] | None = None
        self.modified: set[int] = set()
        self.tickets: dict[int, list[weakref.ref[Ticket]]] = {}

    @property
    def buffer(self) -> HostBuffer | None:
        """Where the bytes are in host memory."""
        return None if self.loan is None else self.loan.buffer

    def places(self, parts: list[Spec]) -> list[Place]:
        """Where tensors lie one behind the other; meta tensors if bytes have no fixed address."""
        if self.extent is None and self.buffer is not None:
            return self.buffer.shaped(parts)
        begins = accumulate((room_for(n.numel() * t.itemsize) for n, t in parts), initial=0)
        shapes = (torch.empty(size, dtype=dtype, device="meta") for size, dtype in parts)
        return list(zip(begins, shapes, strict=False))

    def note_use(self, offloaded: Event) -> None:
        """Note that copies into its buffer are queued, with the event ``offloaded`` behind them."""
        assert self.buffer is not None, "it has no buffer"
        self.offloaded = self.buffer.last_use = offloaded
        self.buffer.before = ()

    def keep_source(self, begin: int, source: Tensor, stream: Stream) -> None:
        """Keep ``source`` until the copy was made; it may be taken back on ``stream``."""
        self.in_flight_sources[begin] = source
        self.stream = stream

    def finish(self) -> None:
        """The copy has ended: drop its sources, unless the tier failed and nothing else is left."""
        for begin in self.watched or ():
            self.check_unmodified(begin)
        self.watched = None
        if self.tier.has_stored(self):
            self.in_flight_sources.clear()

    def drop_buffer(self) -> None:
        """Give the buffer back: the bytes are on disk alone."""
        self.loan = None

    def drop_extent(self) -> None:
        """Give the extent back: the bytes are not on disk."""
        self.extent = None

    def check_unmodified(self, begin: int) -> None:
        """Note a payload that was changed in place. See NOTE [ Modified while queued ]."""
        if self.watched is not None:
            if any(alias._version != version for alias, version in self.watched.get(begin, ())):
                self.modified.add(begin)


class Member(Protocol):
    """A saved tensor that a payload holds."""

    source: Tensor | None
    version: int
    stream: Stream | None
    pending: Tensor | None
    is_part: bool
    ticket: Ticket | None


class Mover(Protocol):
    """What a ticket needs of the transfer engine."""

    @property
    def reloaded_bytes(self) -> int:
        """Bytes on the device that nobody has used yet, or on their way there."""
        ...

    @property
    def refill_below_bytes(self) -> int:
        """With fewer :attr:`reloaded_bytes`, more should be brought."""
        ...

    def deliver(self, ticket: Ticket) -> Tensor:
        """The payload on the device."""
        ...


Where = tuple[int, int]
"""The ``id`` of a host copy, and a first byte there. It means nothing once that copy is gone."""


class DeviceCopy:
    """Device memory that a payload is copied into, for one ticket or for several that share bytes.

    Args:
        tensor: Of the payload's bytes.
        ticket: Whose payload it is.
        stream: The compute stream it was allocated on.

    Attributes:
        reloaded: Behind the copy into it; None until that is queued.
        is_there: Whether that stream has waited for the copy.
        like: The ticket's bytes on the host, which are shaped as the payload is.
        version: Of the tensor when it was first given out.
        num_reloads: Tickets that wait for it or use it.
    """

    __slots__ = (
        "copy",
        "stream",
        "is_there",
        "like",
        "nbytes",
        "num_reloads",
        "reloaded",
        "tensor",
        "version",
        "where",
    )

    def __init__(self, tensor: Tensor, ticket: Ticket, stream: Stream) -> None:
        assert ticket.copy is not None, "reload before offload"
        self.tensor = tensor
        self.stream = stream
        self.nbytes = ticket.nbytes
        self.copy = weakref.ref(ticket.copy)
        self.where = ticket.where
        self.like = ticket.host_bytes
        self.num_reloads = 0
        self.reloaded: Event | None = None
        self.is_there = False
        self.version: int | None = None

    @property
    def is_as_it_came(self) -> bool:
        """Whether nobody who was given it changed it in place."""
        return self.version is None or self.version == self.tensor._version

    def shaped_for(self, ticket: Ticket) -> Tensor:
        """The tensor in this ticket's shape and dtype, which may differ among those sharing it."""
        like = ticket.host_bytes
        if like is self.like:  # seldom not, and to ask tensors for their shapes takes its time
            return self.tensor
        assert like is not None, "reload before offload"
        if self.tensor.shape == like.shape and self.tensor.dtype == like.dtype:
            return self.tensor
        return flat_bytes(self.tensor).view(like.dtype).view(like.shape)


class PendingReload(weakref.ref["Ticket"]):
    """A payload that is on the device or on its way there, until its ticket is used up or gone.

    The engine holds it as well as the ticket: the memory must outlive the copy into it, even if the
    ticket does not. See NOTE [ Nobody is called ].
    """

    __slots__ = ("device_copy", "is_used", "nbytes")

    device_copy: DeviceCopy | None
    """None while a disk is read ahead of the copy."""

    nbytes: int

    is_used: bool
    """Whether it was given out for its ticket."""

    @classmethod
    def of(cls, ticket: Ticket, gone: deque[PendingReload]) -> PendingReload:
        """A reload for ``ticket``, appended to ``gone`` when the ticket is gone."""
        reload = cls(ticket, gone.append)
        reload.device_copy = None
        reload.nbytes = ticket.nbytes
        reload.is_used = False
        return reload


class Ticket:
    """One payload's way to the host and back.

    Args:
        transfer: Moves it.
        label: Its group, for messages.
        payload: Device memory to copy: a whole storage, or a view to be gathered.
        members: The saved tensors these bytes hold; each knows how it is made of them.
        storage: The storage, if the payload is all of it; then other tickets may share its copy.

    Attributes:
        pending_reload: The payload as it came back; None before, and when it was used up.
        index_in_chunk: Which ticket of its chunk it is; by it, uses in a backward are foreseen.
        checksum: Of the payload when it left, with ``verify``.
    """

    __slots__ = (
        "__weakref__",
        "begin",
        "copy",
        "checksum",
        "host_bytes",
        "label",
        "pending_reload",
        "members",
        "nbytes",
        "num_members",
        "num_waiting",
        "payload",
        "index_in_chunk",
        "storage",
        "transfer",
        "where",
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
        self.where: Where = (0, 0)
        self.host_bytes: Tensor | None = None
        self.pending_reload: PendingReload | None = None
        self.index_in_chunk: object = None
        self.checksum: int | None = None

    @property
    def device_tensor(self) -> Tensor | None:
        """The payload on the device. It may hold no data yet."""
        device_copy = None if self.pending_reload is None else self.pending_reload.device_copy
        return None if device_copy is None else device_copy.tensor

    @property
    def is_coming(self) -> bool:
        """Whether the payload is on the device, or on its way there from the disk."""
        return self.pending_reload is not None

    @property
    def in_flight_source(self) -> Tensor | None:
        """The source of a copy that has not been made yet."""
        return None if self.copy is None else self.copy.in_flight_sources.get(self.begin)

    def source(self) -> Tensor:
        """The bytes to copy, contiguous. A gather runs on the compute stream."""
        payload = self.payload
        assert payload is not None, "offloaded twice"
        if self.storage is not None:
            return payload
        with torch.no_grad():
            return payload.contiguous()

    def spec(self) -> Spec:
        """The size and dtype that it needs in a buffer."""
        assert self.payload is not None, "offloaded twice"
        return self.payload.shape, self.payload.dtype

    def attach(self, copy: HostCopy, begin: int, place: Tensor) -> None:
        """Note where its bytes are: ``place``, shaped like it, at byte ``begin`` of ``copy``."""
        self.copy = copy
        self.begin = begin
        self.where = id(copy), begin
        self.host_bytes = place
        same = copy.tickets.setdefault(begin, [])
        while same and same[0]() is None:  # else it grows, where each forward saves the same table
            del same[0]
        same.append(weakref.ref(self))

    def watch(self) -> None:
        """Have the copy watch its members until it was made."""
        copy = self.copy
        assert copy is not None, "it has no copy"
        if copy.watched is None:
            copy.watched = {}
        saved = [(one.source, one.version) for one in self.members if one.source is not None]
        copy.watched.setdefault(self.begin, []).extend(saved)

    def pieces(self) -> list[Tensor]:
        """Its bytes on the host as flat ``uint8`` tensors, where they are not in one piece."""
        assert self.copy is not None and self.copy.buffer is not None, "not in host memory"
        return self.copy.buffer.bytes_at(self.begin, self.nbytes)

    def hand_over(self) -> None:
        """The copy is queued: have the members hold this ticket in place of their tensors."""
        for member in self.members:
            member.ticket = self
            member.source = member.pending = None
        self.members = ()
        self.payload = self.storage = None


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
    places = copy.places([ticket.spec() for ticket in batch])
    for ticket, (begin, tensor) in zip(batch, places, strict=True):
        ticket.attach(copy, begin, tensor)
    return copy
