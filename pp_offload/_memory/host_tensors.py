"""Host tensors that are used together, in one allocation.

A tier gives slabs that are powers of two, so many small tensors are better asked for at once. But
each has a storage of its own: ``torch.save`` and ``copy.deepcopy`` take a tensor's storage as a
whole, and of views of a common one each would take along all the others.

    tensors = host_tensors(likes, lambda nbytes: as_tensor(tier.allocate(nbytes)))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pp_offload._memory.slabs import Allocate

ALIGNMENT = 512
"""Alignment of each tensor in the allocation, in bytes."""


def host_tensors(likes: Sequence[Tensor], allocate: Allocate) -> list[Tensor]:
    """Host tensors of the shapes, dtypes and dense layouts of ``likes``; they hold no data.

    Args:
        likes: Tensors on any device.
        allocate: Gives flat ``uint8`` host memory of at least one byte, which is free again when
            nobody has a view of it.

    Returns:
        Each with a storage of its own. All of the memory is there as long as one of them.

    Raises:
        MemoryError: ``allocate`` has no more.
    """
    begins, end = [], 0
    for like in likes:
        begins.append(end)
        end += -(-like.nbytes // ALIGNMENT) * ALIGNMENT
    memory = allocate(max(end, 1))
    return [
        _shaped(like, _apart(memory[at : at + like.nbytes]))
        for at, like in zip(begins, likes, strict=True)
    ]


def _apart(piece: Tensor) -> Tensor:
    """The same bytes as a storage of their own, which keeps the whole allocation alive."""
    return torch.frombuffer(piece.numpy(), dtype=torch.uint8) if piece.numel() else piece.clone()


def _shaped(like: Tensor, piece: Tensor) -> Tensor:
    """A tensor like this one, on the bytes of ``piece``."""
    strides = torch.empty_like(like, device="meta").stride()
    return piece.view(like.dtype).as_strided(like.shape, strides)
