"""Layout of views in their storages, and their bytes.

``payloads.py`` says when a storage moves whole; other views are gathered. Bytes are always counted
on distinct elements: a broadcast is one element, however large its shape.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pp_offload._common.torch_private import disable_current_modes

ALIGNMENT = 512  # bytes to which device allocators align; kernels may choose their path by it
MAX_PADDING_BYTES = 2**20  # device memory that may be spent to give a gathered view its offset


@dataclass(frozen=True, slots=True)
class Geometry:
    """Layout of a view in its storage. Counts are in elements of ``dtype``."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    @property
    def nbytes(self) -> int:
        """Number of bytes in memory, a broadcast dimension counted once."""
        numel = math.prod(n for n, s in zip(self.size, self.stride, strict=True) if s or n == 0)
        return numel * self.dtype.itemsize

    @property
    def span_numel(self) -> int:
        """Number of elements from the first to the last, both included."""
        if 0 in self.size:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))

    def narrowed(self) -> Geometry:
        """Return this geometry with each broadcast dimension narrowed to one element."""
        dims = zip(self.size, self.stride, strict=True)
        return replace(self, size=torch.Size([n if s else min(n, 1) for n, s in dims]))

    def on_storage_of(self, payload: Tensor) -> Tensor:
        """Return this view of the storage of ``payload``, which is of this dtype or flat ``uint8``,
        with its version counter, as the views that autograd saved had one.
        """
        if payload.dtype != self.dtype:
            whole = payload.nbytes - payload.nbytes % self.dtype.itemsize
            payload = payload[:whole].view(self.dtype)
        return payload.as_strided(self.size, self.stride, self.offset)

    def scattered(self, payload: Tensor) -> Tensor:
        """Return this view in a storage of its own, filled from its gathered elements. It has the
        offset that it had, or only the same alignment, which kernels see, where the memory before
        it would be more than its own and more than :data:`MAX_PADDING_BYTES`.
        """
        offset, span = self.offset, self.span_numel
        if offset > max(span, MAX_PADDING_BYTES // self.dtype.itemsize):
            offset %= max(1, ALIGNMENT // self.dtype.itemsize)
        room = torch.empty(offset + span, dtype=self.dtype, device=payload.device)
        moved = replace(self, offset=offset)
        moved.narrowed().on_storage_of(room).copy_(payload)
        return moved.on_storage_of(room)


def storage_bytes(tensor: Tensor) -> Tensor | None:
    """Return the storage of ``tensor`` as a flat ``uint8`` view with its version counter; None if
    it is no whole number of elements of this dtype.
    """
    numel, rest = divmod(tensor.untyped_storage().nbytes(), tensor.dtype.itemsize)
    return None if rest else tensor.as_strided((numel,), (1,), 0).view(torch.uint8)


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as a flat ``uint8`` view."""
    # With one element it may have any stride, and ``view`` keeps it.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def as_dense(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if its elements do not fill one piece of memory, each once."""
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if is_dense(tensor) else tensor.clone()


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of a strided tensor fill one piece of memory, each once."""
    with disable_current_modes():  # a meta tensor is no device memory
        return tensor.stride() == torch.empty_like(tensor, device="meta").stride()


def has_new_strides(tensor: Tensor) -> bool:
    """Whether a contiguous tensor has the strides of a new one of its shape. A dimension of size
    one, as in a microbatch of one sample, may have any stride.
    """
    strides = accumulate(reversed(tensor.shape), operator.mul, initial=1)
    return 1 not in tensor.shape or all(map(operator.eq, reversed(tensor.stride()), strides))


def order_of(size: Sequence[int], stride: Sequence[int]) -> tuple[Any, ...]:
    """Return in which order dimensions lie in memory, and whether each begins where the one before
    ends; kernels that allow any size are chosen by no more.
    """
    order, begin = [], 1
    for dim in sorted(range(len(size)), key=stride.__getitem__):
        order.append((dim, size[dim] == 1, stride[dim] > begin, stride[dim] < begin))
        begin = stride[dim] * size[dim]
    return tuple(order)
