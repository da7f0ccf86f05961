"""Results of pack hooks: saved tensors, from when autograd saves them until it lets them go.

    Resident  stays on the device
    Saved     stays with its group, or leaves with the group's batch
    Wrapped   a tensor made of other tensors, each saved by itself

A wrapper, such as a DTensor, names the tensors inside it, and is made again around others.

NOTE [ Version check ]
    Autograd does not compare versions of tensors that were saved through hooks, so a program that
    changes a saved tensor in place would get wrong gradients without an error. Each object here
    compares the version when autograd asks, as autograd does without hooks. A tensor that changed
    before its group was committed stays on the device, so that it is there to be compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from pp_offload._common.checks import described
from pp_offload._common.torch_private import (
    DisableTorchDispatch,
    DisableTorchFunctionSubclass,
    is_traceable_wrapper_subclass,
    never_compiled,
)
from pp_offload._core.batch import Batch
from pp_offload.errors import SavedTensorModifiedError


class Saved:
    """A saved tensor that may leave the device."""

    __slots__ = (
        "__weakref__ batch group index maker origin recipe restore tensor version wrapper".split()
    )

    # The batch that has the bytes, and the payload's index there. The commit sets both before it
    # clears ``tensor``: an unpack on another thread sees all of it or nothing.
    batch: Batch
    index: int

    def __init__(self, tensor: Tensor, group: Any) -> None:
        # An alias, for the output of an operator would keep its own graph alive from here; None
        # once the batch has left.
        self.tensor: Tensor | None = tensor.detach()
        self.version, self.group = tensor._version, group
        # The tensor, or the base it is a view of: tensors that count changes together have the
        # same. None for a tensor that is no view and was never changed, which needs none.
        base = tensor._base
        origin = tensor if base is None and self.version else base
        self.origin = None if origin is None else weakref.ref(origin)
        self.wrapper: Tensor | None = None  # of a tensor inside a wrapper: what counts its changes
        # Makes the tensor from its payload; None where it is the payload.
        self.restore: Callable[[Tensor], Tensor] | None = None
        self.maker: Any = None  # see maker_of(); None once the group is closed
        self.recipe: Any = None  # in place of a batch; True where a recipe could be, and it stays

    @property
    def here(self) -> Tensor:
        """The tensor, which is still on the device."""
        assert self.tensor is not None
        return self.tensor

    def twin(self, group: Any) -> Saved:
        """Return another holder of the same tensor, for a recipe that needs it in ``group``."""
        twin = Saved.__new__(Saved)
        twin.tensor, twin.version, twin.origin = self.tensor, self.version, self.origin
        twin.wrapper, twin.restore = self.wrapper, self.restore
        twin.group, twin.maker, twin.recipe = group, None, None
        return twin

    @never_compiled
    def unpack(self) -> Tensor:
        """Return the tensor as it was saved, and laid out; raise if it was changed in place."""
        tensor = self.tensor  # read once: a commit on another thread may clear it
        group = self.group
        try:
            if not group.is_used:
                group.engine.reach(group)
            if tensor is None:
                if self.recipe is None:
                    payload = self.batch.mover.deliver(self.batch, self.index)
                    for tell in group.engine.observers.used:
                        tell(self, payload)
                else:
                    payload = self.recipe.give()
                return payload if self.restore is None else self.restore(payload)
        except BaseException as failure:
            group.engine.tear(failure)
            raise
        if tensor._version != self.version:
            raise modified(tensor, self.version, group.name)
        return tensor


class Resident:
    """A saved tensor that stays on the device."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # An alias, but for a leaf Parameter, which has no graph and is itself what operators want.
        kind = type(tensor)  # first, for isinstance() of a Parameter runs Python code
        is_parameter = kind is not Tensor and (kind is Parameter or isinstance(tensor, Parameter))
        self.tensor = tensor if is_parameter and tensor.is_leaf else tensor.detach()
        self.version = tensor._version

    @never_compiled
    def unpack(self) -> Tensor:
        """Return the tensor; raise if it was changed in place since it was saved."""
        tensor = self.tensor
        if tensor._version != self.version:
            raise modified(tensor, self.version, None)
        return tensor


class Wrapped:
    """A saved tensor made of other tensors, such as a DTensor."""

    __slots__ = ("around", "group", "inner", "version", "witness")

    def __init__(self, tensor: Tensor, group: str, pack: Callable[[Tensor], Packed]) -> None:
        self.group, self.version = group, tensor._version
        # Only the wrapper counts a change in place. An alias made so has its counter, and keeps no
        # tensor inside alive.
        with DisableTorchFunctionSubclass(), DisableTorchDispatch():
            self.witness = tensor.detach()
        self.around, inner = take_apart(tensor)
        self.inner = {name: pack(part) for name, part in inner.items()}
        for part in self.inner.values():
            if isinstance(part, Saved):  # the wrapper counts changes, the part does not
                part.wrapper = tensor if is_pending(tensor) else self.witness

    @never_compiled
    def unpack(self) -> Tensor:
        """Return the tensor as it was saved, rebuilt around the tensors inside."""
        if self.witness._version != self.version:
            raise modified(self.witness, self.version, self.group)
        return self.around({name: part.unpack() for name, part in self.inner.items()})


Packed: TypeAlias = Saved | Resident | Wrapped
"""Results of a pack hook."""


def modified(tensor: Tensor, version: int, group: str | None) -> SavedTensorModifiedError:
    """Return the error that autograd would have raised, with the name of the group."""
    where = "the saved tensors left on the device" if group is None else f"group '{group}'"
    return SavedTensorModifiedError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {described(tensor)} in {where} is at version "
        f"{tensor._version}, expected version {version}; use an out-of-place operation"
    )


def is_wrapper(tensor: Tensor) -> bool:
    """Whether ``tensor`` is made of other tensors, and can be rebuilt from copies of them. A jagged
    one cannot: its ragged size belongs to one offsets tensor, not to its copy.
    """
    is_plain = type(tensor) in (Tensor, Parameter) or tensor.layout is not torch.strided
    return not is_plain and is_traceable_wrapper_subclass(tensor)


def is_pending(tensor: Tensor) -> bool:
    """Whether ``tensor`` is the result of a collective that was not waited for yet."""
    return getattr(tensor, "completed", True) is False


def take_apart(tensor: Tensor) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    """Return what makes a wrapper around other tensors, and aliases of its own, which may be
    wrappers again; the result of a collective itself, for no alias would tell when it is there.
    """
    detached: Any = tensor.detach()
    names, context = detached.__tensor_flatten__()
    is_result = {name: hasattr(getattr(tensor, name), "completed") for name in names}
    parts = {name: getattr(tensor if is_result[name] else detached, name) for name in names}
    inner = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
    others = {name: part for name, part in parts.items() if name not in inner}  # such as a mesh
    kind: Any = type(tensor)
    size, stride = tensor.shape, tensor.stride()

    def around(tensors: Mapping[str, Tensor]) -> Tensor:
        made: Tensor = kind.__tensor_unflatten__({**others, **tensors}, context, size, stride)
        return made

    return around, inner


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that have the bytes; ``tensor`` itself unless it is a wrapper."""
    if not is_wrapper(tensor):
        yield tensor
        return
    for inner in take_apart(tensor)[1].values():
        yield from plain_tensors(inner)
