"""Takes apart tensors made of other tensors, such as DTensor, and rebuilds them.

A traceable wrapper subclass has no bytes of its own; it names the tensors inside it, and can make a
tensor like itself around others.

    wrapper, inner = take_apart(tensor)
    same = wrapper.around(inner)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pp_offload._common.torch_private import (
    DisableTorchDispatch,
    DisableTorchFunctionSubclass,
    is_traceable_wrapper_subclass,
)


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A tensor subclass without the tensors inside it."""

    kind: Any
    context: Any
    size: torch.Size
    stride: tuple[int, ...]
    others: Mapping[str, Any]
    """Named attributes that are no tensors, such as the mesh of a DTensor."""

    def around(self, inner: Mapping[str, Tensor]) -> Tensor:
        parts = {**self.others, **inner}
        made: Tensor = self.kind.__tensor_unflatten__(parts, self.context, self.size, self.stride)
        return made


def is_wrapper(tensor: Tensor) -> bool:
    """Whether ``tensor`` is made of other tensors, and can be rebuilt from copies of them.

    A jagged nested tensor cannot: its ragged size belongs to one offsets tensor, not to its copy.
    """
    kind = type(tensor)
    if kind is Tensor or kind is Parameter:
        return False
    return tensor.layout is torch.strided and is_traceable_wrapper_subclass(tensor)


def is_pending(tensor: Tensor) -> bool:
    """Whether ``tensor`` is the result of a collective that was not waited for yet."""
    return getattr(tensor, "completed", True) is False


def take_apart(tensor: Tensor) -> tuple[Wrapper, dict[str, Tensor]]:
    """Return a wrapper without its tensors, and aliases of these, which may be wrappers again."""
    detached: Any = tensor.detach()
    names, context = detached.__tensor_flatten__()
    parts = {name: getattr(detached, name) for name in names}
    inner = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
    attributes = {name: part for name, part in parts.items() if name not in inner}
    return Wrapper(type(tensor), context, tensor.shape, tensor.stride(), attributes), inner


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that have the bytes; ``tensor`` itself unless it is a wrapper."""
    if not is_wrapper(tensor):
        yield tensor
        return
    for inner in take_apart(tensor)[1].values():
        yield from plain_tensors(inner)


def witness(tensor: Tensor) -> Tensor:
    """Return an alias with the version counter of a wrapper; it keeps no tensor inside alive.

    Only the wrapper counts a change in place, not the tensors inside.
    """
    with DisableTorchFunctionSubclass(), DisableTorchDispatch():
        return tensor.detach()
