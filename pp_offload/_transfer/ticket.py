"""A saved tensor that may leave the device, the ticket of its bytes, and what came back of them.

A :class:`SavedActivation` starts by holding the tensor. When its group is offloaded it becomes the
:class:`Ticket` of these bytes, and holds nothing on the device any more. Where several are made of
the same bytes, or one of a part of a storage, they hold a :class:`PayloadTicket` instead. While a
payload is on the device again, or on its way there, its ticket has a :class:`Reload`. Whatever
happens to groups, chunks and plans, a saved tensor can always be given back, as often as it is
asked for, and what it holds is freed when autograd drops it.

    tickets = tickets_for(saved, transfer, "mlp")  # of ``payload.py``
    transfer.offload(tickets)                # their copies are queued
    hand_over(tickets)                       # the saved tensors hold no device memory any more
    tensor = transfer.deliver(tickets[0])    # when autograd asks

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

import enum
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage

from pp_offload._common.checks import described, version_of
from pp_offload._transfer.block import NOWHERE, Block
from pp_offload.backends import Event, Stream
from pp_offload.errors import SavedTensorModifiedError

Restore = Callable[[Tensor], Tensor]
"""Makes a saved tensor of the payload that holds it."""

NO_BYTES = torch.empty(0, device="cpu")
"""The place of a payload that is nowhere."""


class Away(enum.Enum):
    """What a saved tensor holds that is the ticket of its own bytes, once they have left."""

    AWAY = "off the device"


AWAY = Away.AWAY


class Owner(Protocol):
    """The group a saved tensor belongs to."""

    name: str
    is_used: bool

    def on_use(self) -> None:
        """Backward is about to use one of the group's tensors."""
        ...


class Mover(Protocol):
    """What a ticket needs of the transfer engine."""

    def deliver(self, ticket: Ticket) -> Tensor:
        """The payload on the device."""
        ...


class Ticket:
    """One payload's way to the host and back.

    Attributes:
        transfer: Moves it.
        label: Its group, for messages.
        payload: Device memory to copy: a whole storage, or a view to be gathered. Until it left.
        members: The saved tensors these bytes hold; each knows how it is made of them. Until then.
        storage: The storage, if the payload is all of it; then other tickets may share its copy.
        num_members: How many saved tensors there are.
        block, begin, host_bytes: Where the bytes are, once a tier has room for them.
        reload: The payload as it came back; None before, and when it was used up.
        num_waiting: See NOTE [ Uses ].
        index_in_chunk: Which ticket of its chunk it is; by it, uses in a backward are foreseen.
        checksum: Of the payload when it left, with ``verify``.
    """

    __slots__ = (
        "__weakref__",
        "begin",
        "block",
        "checksum",
        "host_bytes",
        "index_in_chunk",
        "label",
        "nbytes",
        "num_waiting",
        "payload",
        "reload",
        "storage",
        "transfer",
    )

    transfer: Mover
    label: str
    payload: Tensor
    storage: UntypedStorage | None
    block: Block
    begin: int
    host_bytes: Tensor
    nbytes: int
    num_waiting: int
    reload: Reload | None
    index_in_chunk: object
    checksum: int | None
    num_members: int

    def begin_with(
        self,
        transfer: Mover,
        label: str,
        payload: Tensor,
        storage: UntypedStorage | None,
        num_members: int,
    ) -> None:
        """Be the ticket of these bytes, which are nowhere else yet."""
        self.transfer = transfer
        self.label = label
        self.payload = payload
        self.storage = storage
        self.nbytes = payload.nbytes
        self.num_waiting = num_members
        self.block = NOWHERE
        self.reload = None
        self.index_in_chunk = None
        self.checksum = None

    @property
    def members(self) -> Sequence[SavedActivation]:
        raise NotImplementedError

    @property
    def device_tensor(self) -> Tensor | None:
        """The payload on the device. It may hold no data yet."""
        return None if self.reload is None else self.reload.tensor

    def source(self) -> Tensor:
        """The bytes to copy, contiguous. A gather runs on the compute stream."""
        if self.storage is not None:
            return self.payload
        with torch.no_grad():
            return self.payload.contiguous()

    def attach(self, block: Block, begin: int, place: Tensor) -> None:
        """Share bytes of another ticket: ``place``, shaped like it, at ``begin`` of ``block``."""
        self.block, self.begin, self.host_bytes = block, begin, place
        block.share(self)

    def pieces(self) -> list[Tensor]:
        """Its bytes on the host as flat ``uint8`` tensors, where they are not in one piece."""
        buffer = self.block.buffer
        return [] if buffer is None else buffer.bytes_at(self.begin, self.nbytes)


class SavedActivation(Ticket):
    """A saved tensor that may leave the device, and nearly always the ticket of its bytes then.

    Until :meth:`begin_with` it is no ticket, and has no attribute of one.

    Args:
        tensor: What autograd saves.
        owner: Its group, told when backward first asks for one of its tensors.
        stream: The stream of the operation that saves it; None means that of the commit.

    Attributes:
        held: The tensor itself; once that has left, :data:`AWAY`, or the ticket that has its bytes.
        restore: Makes the tensor of that ticket's payload; None where it is the tensor.
        inside: The wrapper it is inside of, or its witness; changes made through that are missed by
            its own version. None once it has left.
        origin: Refers to the tensor, or to what it is a view of. The same weak reference for all
            that count changes together; a number of ``version`` alone may be another counter's.
    """

    __slots__ = ("held", "inside", "origin", "owner", "restore", "stream", "version")

    num_members = 1

    def __init__(self, tensor: Tensor, owner: Owner, stream: Stream | None = None) -> None:
        self.held: Tensor | Ticket | Away = tensor.detach()
        self.version = tensor._version
        base = tensor._base
        self.origin = weakref.ref(tensor if base is None else base)
        self.owner = owner
        self.stream = stream
        self.restore: Restore | None = None
        self.inside: Tensor | None = None

    def unpack(self) -> Tensor:
        """The tensor as it was saved: values, size, stride and dtype."""
        held, owner = self.held, self.owner  # read once: a commit on another thread may change it
        if held is AWAY:
            if self.reload is None or not owner.is_used:
                owner.on_use()
            return self.transfer.deliver(self)
        if isinstance(held, Ticket):
            if held.reload is None or not owner.is_used:
                owner.on_use()
            payload = held.transfer.deliver(held)
            return payload if self.restore is None else self.restore(payload)
        if not owner.is_used:
            owner.on_use()
        if held._version != self.version:
            raise modified(held, self.version, owner.name)
        return held

    @property
    def members(self) -> Sequence[SavedActivation]:
        return (self,)


class PayloadTicket(Ticket):
    """The ticket of bytes that several saved tensors are made of, or of a part of a storage.

    Args:
        transfer, label, payload, members, storage: See :class:`Ticket`.
        has_gaps: Whether bytes of the storage are of no member: anybody may change them.
    """

    __slots__ = ("has_gaps", "members", "num_members")

    members: Sequence[SavedActivation]

    def __init__(
        self,
        transfer: Mover,
        label: str,
        payload: Tensor,
        members: Sequence[SavedActivation],
        storage: UntypedStorage | None,
        has_gaps: bool = False,
    ) -> None:
        self.begin_with(transfer, label, payload, storage, len(members))
        self.has_gaps = has_gaps
        self.members = members
        self.num_members = len(members)
        self.begin, self.host_bytes = 0, NO_BYTES


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


class Shared:
    """What reloads with the same memory have in common.

    It is no reload of theirs: one whose ticket is gone would keep the memory until somebody polls.

    Args:
        first: The one that has the memory until now.
    """

    __slots__ = ("nbytes", "num_users", "version")

    def __init__(self, first: Reload) -> None:
        self.nbytes = first.nbytes
        self.version = first.version
        self.num_users = 1
        """Reloads that use it, each until it is given up."""


class Reload(weakref.ref[Ticket]):
    """A payload that is on the device or on its way there, until its ticket is used up or gone.

    The engine holds it as well as the ticket: the memory must outlive the copy into it, even if the
    ticket does not. See NOTE [ Nobody is called ].
    """

    __slots__ = ("arrival", "nbytes", "shared", "tensor", "version")

    # By identity: a ticket has one after the other, and references to the same object are equal.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    arrival: Arrival | None
    """None while a disk is read ahead of the copy."""

    tensor: Tensor | None
    """The memory, shaped as the payload of the ticket it was allocated for."""

    shared: Shared | None
    """Where tickets with the same bytes use the same memory."""

    version: int | None
    """Of the memory when it was given out for its ticket; None before."""

    nbytes: int

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
        version, tensor = (self.shared or self).version, self.tensor
        return version is None or tensor is None or version == tensor._version


def place(batch: list[Ticket], block: Block) -> Block:
    """Give every ticket its place in ``block``, which it gives back."""
    places = block.places([(ticket.payload.shape, ticket.payload.dtype) for ticket in batch])
    buffer = block.buffer
    is_in_one_piece = buffer is None or len(buffer.pieces) == 1
    block.has_addresses = is_in_one_piece and not places[0][1].is_meta
    for ticket, (begin, tensor) in zip(batch, places, strict=True):
        ticket.block, ticket.begin, ticket.host_bytes = block, begin, tensor
    block.tickets = list(map(weakref.ref, batch))
    return block


def give_back(tickets: Sequence[Ticket]) -> None:
    """They stay after all, but for those handed over before an interrupt: no saved tensor keeps
    room that it has got, or counts on the way back. Other tickets go by themselves, if nothing that
    they refer to holds them.
    """
    for ticket in tickets:
        ticket.payload, ticket.storage = NO_BYTES, None
        if isinstance(ticket, PayloadTicket):
            ticket.members = ()
        elif isinstance(ticket, SavedActivation) and ticket.held is not AWAY:
            ticket.block = NOWHERE
            ticket.num_waiting = 0  # a block that it was to share is not to bring it


def hand_over(tickets: Sequence[Ticket]) -> None:
    """Copies are queued: have saved tensors hold their tickets in place of memory."""
    for ticket in tickets:
        if isinstance(ticket, SavedActivation):
            ticket.held = AWAY
            ticket.inside = None
        elif isinstance(ticket, PayloadTicket):
            for member in ticket.members:
                member.held = ticket
                member.inside = None
            ticket.members = ()
        ticket.payload, ticket.storage = NO_BYTES, None


def modified(tensor: Tensor, version: int, group: str | None) -> SavedTensorModifiedError:
    """The error autograd would have raised, with the group's name."""
    where = f"group '{group}'" if group is not None else "the saved tensors left on the device"
    return SavedTensorModifiedError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {described(tensor)} in {where} is at version "
        f"{version_of(tensor)}, expected version {version}; use an out-of-place operation"
    )
