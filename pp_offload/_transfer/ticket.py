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
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage

from pp_offload._memory.buffers import PART_ALIGNMENT, HostBuffer, Loan, Place, Spec, room_for
from pp_offload._memory.disk import DiskEvent, DiskExtent
from pp_offload.backends import Event, Stream
from pp_offload.errors import OffloadError

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
        has_addresses: Whether each payload has a place in host memory, in one piece.
        tickets: Those it was made for, in the order they were saved.
        shared: By first byte, all tickets of bytes that several groups saved.
        in_flight_sources: By first byte, the sources, until the copy was made.
        watched: By first byte, the saved tensors of each payload, until the copy was made. A pack
            holds thousands, so a payload that is asked for before then is checked alone.
        modified: First bytes of payloads that were changed in place before.
    """

    __slots__ = (
        "__weakref__",
        "extent",
        "has_addresses",
        "in_flight_sources",
        "loan",
        "modified",
        "offloaded",
        "reading",
        "shared",
        "stream",
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
        self.has_addresses = True
        self.offloaded: Event | None = None
        self.reading: DiskEvent | None = None
        self.stream: Stream | None = None
        self.in_flight_sources: dict[int, Tensor] = {}
        self.watched: dict[int, Sequence[Watched]] = {}
        self.modified: set[int] = set()
        self.tickets: list[weakref.ref[Ticket]] = []
        self.shared: dict[int, list[weakref.ref[Ticket]]] = {}

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

    def finish(self) -> None:
        """The copy has ended: drop its sources, unless the tier failed and nothing else is left."""
        for begin in self.watched:
            self.check_unmodified(begin)
        self.watched = {}
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
        for alias, version in self.watched.get(begin, ()):
            if alias._version != version:
                self.modified.add(begin)

    def share(self, ticket: Ticket) -> None:
        """Note one more ticket of bytes that another had copied."""
        first = (ref for ref in self.tickets if (one := ref()) and one.begin == ticket.begin)
        same = self.shared.setdefault(ticket.begin, list(first))
        while same and same[0]() is None:  # else it grows, where each forward saves the same table
            del same[0]
        same.append(weakref.ref(ticket))


class _Nowhere:
    """The tier of what has not left."""

    name = "nowhere"

    def load(self, tickets: Sequence[Ticket], *, is_ahead: bool) -> int:
        raise OffloadError("a payload was asked for before it was offloaded; please report this")

    def has_stored(self, copy: HostCopy) -> bool:
        return False

    def may_capture(self, copy: HostCopy | None = None) -> bool:
        return True


NOWHERE = HostCopy(_Nowhere())
"""Where the bytes of a ticket are before it is offloaded."""

NO_BYTES = torch.empty(0, device="cpu")
"""Its place there."""


class Member(Protocol):
    """A saved tensor that a payload holds."""

    held: Tensor | Ticket
    version: int
    stream: Stream | None
    pending: Tensor | None
    is_part: bool


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

    @property
    def is_known(self) -> bool:
        """Whether it may be waited for: no interrupt came before its event was known."""
        return self.is_there or self.reloaded is not None


class Reload(weakref.ref["Ticket"]):
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

    @property
    def is_as_it_came(self) -> bool:
        """Whether nobody who was given the memory changed it in place."""
        version, tensor = (self.lead or self).version, self.tensor
        return version is None or tensor is None or version == tensor._version


class Reloads(Protocol):
    """What is on the device again, or on its way there: see ``pending_reloads.py``."""

    nbytes: int
    """Bytes that nobody has used yet."""

    refill_below_bytes: int
    """With fewer :attr:`nbytes`, more should be brought."""


class Mover(Protocol):
    """What a ticket needs of the transfer engine."""

    @property
    def reloads(self) -> Reloads:
        """Bytes on the device that nobody has used yet, or on their way there."""
        ...

    def deliver(self, ticket: Ticket) -> Tensor:
        """The payload on the device."""
        ...


class Ticket:
    """One payload's way to the host and back.

    Args:
        transfer: Moves it.
        label: Its group, for messages.
        payload: Device memory to copy: a whole storage, or a view to be gathered.
        members: The saved tensors these bytes hold; each knows how it is made of them.
        storage: The storage, if the payload is all of it; then other tickets may share its copy.

    Attributes:
        reload: The payload as it came back; None before, and when it was used up.
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
        "reload",
        "members",
        "nbytes",
        "num_members",
        "num_waiting",
        "payload",
        "index_in_chunk",
        "storage",
        "transfer",
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
        self.copy = NOWHERE
        self.begin = 0
        self.host_bytes = NO_BYTES
        self.reload: Reload | None = None
        self.index_in_chunk: object = None
        self.checksum: int | None = None

    @property
    def device_tensor(self) -> Tensor | None:
        """The payload on the device. It may hold no data yet."""
        return None if self.reload is None else self.reload.tensor

    @property
    def is_coming(self) -> bool:
        """Whether the payload is on the device, or on its way there from the disk."""
        return self.reload is not None

    @property
    def in_flight_source(self) -> Tensor | None:
        """The source of a copy that has not been made yet."""
        return self.copy.in_flight_sources.get(self.begin)

    def source(self) -> Tensor:
        """The bytes to copy, contiguous. A gather runs on the compute stream."""
        payload = self.payload
        assert payload is not None, "offloaded twice"
        if self.storage is not None:
            return payload
        with torch.no_grad():
            return payload.contiguous()

    def attach(self, copy: HostCopy, begin: int, place: Tensor) -> None:
        """Share bytes of another ticket: ``place``, shaped like it, at ``begin`` of ``copy``."""
        self.copy, self.begin, self.host_bytes = copy, begin, place
        copy.share(self)

    def watched(self) -> list[Watched]:
        """The members, as the copy watches them until it was made."""
        members = self.members
        return [(one.held, one.version) for one in members if not isinstance(one.held, Ticket)]

    def pieces(self) -> list[Tensor]:
        """Its bytes on the host as flat ``uint8`` tensors, where they are not in one piece."""
        buffer = self.copy.buffer
        return [] if buffer is None else buffer.bytes_at(self.begin, self.nbytes)

    def hand_over(self) -> None:
        """The copy is queued: have the members hold this ticket in place of their tensors."""
        for member in self.members:
            member.held = self
            member.pending = None
        self.members = ()
        self.payload = self.storage = None


def packs(tickets: Sequence[Ticket]) -> list[tuple[list[Ticket], int]]:
    """Tickets that share a copy, and the bytes it takes: small ones together, others alone."""
    found: list[tuple[list[Ticket], int]] = []
    batch: list[Ticket] = []
    room = 0
    for ticket in tickets:
        nbytes = ticket.nbytes
        if batch and room + nbytes > PACK_BYTES:
            found.append((batch, room if len(batch) > 1 else batch[0].nbytes))
            batch, room = [], 0
        batch.append(ticket)
        room += -(-nbytes // PART_ALIGNMENT) * PART_ALIGNMENT
    found.append((batch, room if len(batch) > 1 else batch[0].nbytes))
    return found


def place(batch: list[Ticket], copy: HostCopy) -> HostCopy:
    """Give every ticket its place in ``copy``, which it gives back."""
    refs = copy.tickets
    specs = [(one.shape, one.dtype) for ticket in batch if (one := ticket.payload) is not None]
    for ticket, (begin, tensor) in zip(batch, copy.places(specs), strict=True):
        ticket.copy, ticket.begin, ticket.host_bytes = copy, begin, tensor
        if tensor.is_meta:
            copy.has_addresses = False
        refs.append(weakref.ref(ticket))
    return copy
