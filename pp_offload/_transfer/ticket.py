"""A saved tensor that may leave the device, the ticket of its bytes, and what came back of them.

A :class:`SavedActivation` starts by holding the tensor. When its group is offloaded it holds a
:class:`Ticket` instead, alone or with others that are made of the same payload. While the payload
is on the device again, or on its way there, the ticket has a :class:`Reload`. Whatever happens to
groups, chunks and plans, a saved tensor can always be given back, as often as it is asked for, and
what it holds is freed when autograd drops it.

    ticket = Ticket(transfer, "mlp", payload, members, storage)
    transfer.offload([ticket])          # its copy is queued
    hand_over([ticket])                 # the saved tensors hold the ticket instead of their memory
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


class Owner(Protocol):
    """The group a saved tensor belongs to."""

    name: str
    is_used: bool

    def on_use(self) -> None:
        """Backward is about to use one of the group's tensors."""
        ...


class SavedActivation:
    """A saved tensor that may leave the device.

    Args:
        tensor: What autograd saves.
        owner: Its group, told when backward first asks for one of its tensors.
        stream: The stream of the operation that saves it; None means that of the commit.

    Attributes:
        held: The tensor itself; a ticket once that has its bytes.
        restore: Makes the tensor of the ticket's payload; None where that is the tensor.
        inside: The wrapper it is inside of, or its witness; changes made through that are missed by
            its own version. None once a ticket is held.
    """

    __slots__ = ("__weakref__", "held", "inside", "owner", "restore", "stream", "version")

    def __init__(self, tensor: Tensor, owner: Owner, stream: Stream | None = None) -> None:
        self.held: Tensor | Ticket = tensor.detach()
        self.version = tensor._version
        self.owner = owner
        self.stream = stream
        self.restore: Restore | None = None
        self.inside: Tensor | None = None

    def unpack(self) -> Tensor:
        """The tensor as it was saved: values, size, stride and dtype."""
        held, owner = self.held, self.owner  # read once: a commit on another thread may change it
        if not isinstance(held, Ticket):
            if not owner.is_used:
                owner.on_use()
            if held._version != self.version:
                raise modified(held, self.version, owner.name)
            return held
        if held.reload is None or not owner.is_used:
            owner.on_use()
        payload = held.transfer.deliver(held)
        return payload if self.restore is None else self.restore(payload)


class Mover(Protocol):
    """What a ticket needs of the transfer engine."""

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
        "block",
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
        members: Sequence[SavedActivation],
        storage: UntypedStorage | None,
    ) -> None:
        self.transfer = transfer
        self.label = label
        self.payload = payload
        self.members = members
        self.storage = storage
        self.nbytes = payload.nbytes
        self.num_members = self.num_waiting = len(members)
        self.block = NOWHERE
        self.begin = 0
        self.host_bytes = NO_BYTES
        self.reload: Reload | None = None
        self.index_in_chunk: object = None
        self.checksum: int | None = None

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

    __slots__ = ("arrival", "is_used", "nbytes", "shared", "tensor", "version")

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
    """Of the memory when it was first given out, where it is not shared."""

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
        version, tensor = (self.shared or self).version, self.tensor
        return version is None or tensor is None or version == tensor._version


def place(batch: list[Ticket], block: Block) -> Block:
    """Give every ticket its place in ``block``, which it gives back."""
    refs = block.tickets
    specs = [(ticket.payload.shape, ticket.payload.dtype) for ticket in batch]
    for ticket, (begin, tensor) in zip(batch, block.places(specs), strict=True):
        ticket.block, ticket.begin, ticket.host_bytes = block, begin, tensor
        if tensor.is_meta:
            block.has_addresses = False
        refs.append(weakref.ref(ticket))
    return block


def hand_over(tickets: Sequence[Ticket]) -> None:
    """Copies are queued: have saved tensors hold their tickets in place of memory."""
    for ticket in tickets:
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
