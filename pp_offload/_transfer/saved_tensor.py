"""What a pack hook returns: one saved tensor, from when autograd saves it until it drops it.

A :class:`SavedActivation` may leave the device; the others stay, or are made of it.

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
from typing import TypeAlias

from torch import Tensor
from torch.nn import Parameter

from pp_offload._core.subclasses import is_pending, take_apart, witness
from pp_offload._transfer.ticket import SavedActivation, modified


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
                one.inside = tensor if is_pending(tensor) else self.witness

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
