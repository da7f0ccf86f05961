"""What a pack hook returns: one saved tensor, from when autograd saves it until it drops it.

A :class:`SavedActivation` starts by holding the tensor. When its group is offloaded it holds a
ticket instead. Whatever happens to groups, chunks and plans, it can always give the tensor back, as
often as it is asked, and what it holds is freed when autograd drops it.

NOTE [ Version check ]
    Autograd does not compare versions of tensors saved through hooks, so a program that changes a
    saved tensor in place would silently get wrong gradients. Every packed object compares them
    when it is asked for its tensor, as autograd would. A tensor that was changed before its group
    was committed stays on the device, so that it is still there to be compared. A change after the
    bytes have left does no harm; a :class:`SavedWrapper` raises for it nonetheless, as autograd
    would.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from pp_offload._common.checks import described, version_of
from pp_offload._transfer.subclasses import is_pending, take_apart, witness
from pp_offload._transfer.ticket import Restore, Ticket
from pp_offload.backends import Stream
from pp_offload.errors import SavedTensorModifiedError


class Owner(Protocol):
    """The group a saved tensor belongs to."""

    name: str
    is_used: bool

    def on_use(self) -> None:
        """Backward is about to use one of the group's tensors."""
        ...


class Resident:
    """A saved tensor that stays on the device. See NOTE [ Version check ]."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # An alias: the output of an operator would keep its own graph alive from here. The alias
        # also lets others tell that the storage is in use.
        is_plain = type(tensor) is Tensor or not isinstance(tensor, Parameter)
        self.tensor = tensor.detach() if is_plain or not tensor.is_leaf else tensor
        self.version = tensor._version

    def unpack(self) -> Tensor:
        """The tensor, if nobody changed it since."""
        tensor = self.tensor
        if tensor._version != self.version:
            raise modified(tensor, self.version, None)
        return tensor


class SavedActivation:
    """A saved tensor that may leave the device.

    Args:
        tensor: What autograd saves.
        owner: Its group, told when backward first asks for one of its tensors.
        stream: The stream of the operation that saves it; None means that of the commit.

    Attributes:
        held: The tensor itself; a ticket once that has its bytes.
        restore: Makes the tensor of the ticket's payload; None where that is the tensor.
        pending: The wrapper it is inside of, if that is a collective's result nobody waited for.
        is_part: Whether it is inside a wrapper. Its version misses changes made through that.
    """

    __slots__ = (
        "__weakref__",
        "held",
        "is_part",
        "owner",
        "pending",
        "restore",
        "stream",
        "version",
    )

    def __init__(self, tensor: Tensor, owner: Owner, stream: Stream | None = None) -> None:
        self.held: Tensor | Ticket = tensor.detach()
        self.version = tensor._version
        self.owner = owner
        self.stream = stream
        self.restore: Restore | None = None
        self.pending: Tensor | None = None
        self.is_part = False

    def unpack(self) -> Tensor:
        """The tensor as it was saved: values, size, stride and dtype."""
        held, owner = self.held, self.owner  # read once: a commit on another thread may change it
        if not isinstance(held, Ticket):
            if not owner.is_used:
                owner.on_use()
            if held._version != self.version:
                raise modified(held, self.version, owner.name)
            return held
        transfer = held.transfer
        if held.reload is None or not owner.is_used:
            owner.on_use()
        payload = transfer.deliver(held)
        reloads = transfer.reloads
        if reloads.nbytes < reloads.refill_below_bytes:
            owner.on_use()
        return payload if self.restore is None else self.restore(payload)


class SavedWrapper:
    """A saved tensor made of others, each of them saved on its own.

    Args:
        tensor: What autograd saves.
        group: Its group's name, for messages.
        pack: Saves a tensor inside it.
    """

    __slots__ = ("group", "inner", "version", "witness", "wrapper")

    def __init__(self, tensor: Tensor, group: str, pack: Callable[[Tensor], Packed]) -> None:
        self.group = group
        self.witness = witness(tensor)
        self.version = tensor._version
        self.wrapper, inner = take_apart(tensor)
        self.inner = {name: pack(one) for name, one in inner.items()}
        for one in self.inner.values():
            if isinstance(one, SavedActivation):
                one.is_part = True
                one.pending = tensor if is_pending(tensor) else None

    @property
    def is_resident(self) -> bool:
        """Whether nothing inside may leave the device."""
        return all(isinstance(one, Resident) for one in self.inner.values())

    def unpack(self) -> Tensor:
        """The tensor as it was saved, made anew around its unpacked inner tensors."""
        if self.witness._version != self.version:
            raise modified(self.witness, self.version, self.group)
        return self.wrapper.around({name: one.unpack() for name, one in self.inner.items()})


Packed: TypeAlias = SavedActivation | Resident | SavedWrapper
"""What a pack hook returns."""


unpack: Callable[[Packed], Tensor] = methodcaller("unpack")
"""The unpack hook."""


def modified(tensor: Tensor, version: int, group: str | None) -> SavedTensorModifiedError:
    """The error autograd would have raised, with the group's name."""
    where = f"group '{group}'" if group is not None else "the saved tensors left on the device"
    return SavedTensorModifiedError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {described(tensor)} in {where} is at version "
        f"{version_of(tensor)}, expected version {version}; use an out-of-place operation"
    )


def is_in_backward() -> bool:
    """Whether a backward runs this: a forward inside it is a recomputation, used at once."""
    return int(torch._C._current_graph_task_id()) != -1
