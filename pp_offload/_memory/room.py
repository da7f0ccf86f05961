"""Host tensors that are used together, in one allocation.

Pinning costs a system call, and PyTorch's pinned allocator rounds every block up.

    views = host_room(tensors, backend.allocate_host)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from pp_offload._memory.slabs import Allocate, pageable

logger = logging.getLogger(__name__)

ALIGNMENT = 512
"""Of each tensor in the allocation. In bytes."""


def host_room(
    likes: Sequence[Tensor], allocate: Allocate, *, is_shared: bool = True
) -> list[Tensor]:
    """Host tensors of the shapes, dtypes and dense layouts of ``likes``; they hold no data.

    Memory that cannot be pinned is replaced by ordinary memory, with a warning.

    Args:
        likes: Tensors on any device.
        allocate: Gives flat ``uint8`` host memory in bytes.
        is_shared: Whether they are views of one storage; else each has one of its own, to be saved
            or copied apart. The memory is there as long as one of them.

    Raises:
        MemoryError: The system has no more.
    """
    begins, end = [], 0
    for like in likes:
        begins.append(end)
        end += -(-like.nbytes // ALIGNMENT) * ALIGNMENT
    slab = _allocated(end, allocate)
    pieces = [slab[at : at + like.nbytes] for at, like in zip(begins, likes, strict=True)]
    if not is_shared:
        pieces = [_apart(piece) for piece in pieces]
    return [_placed(like, piece) for like, piece in zip(likes, pieces, strict=True)]


def _apart(piece: Tensor) -> Tensor:
    """The same bytes as a storage, which keeps the whole they are a piece of."""
    return torch.frombuffer(piece.numpy(), dtype=torch.uint8) if piece.numel() else piece.clone()


def _placed(like: Tensor, piece: Tensor) -> Tensor:
    """A tensor like this one, on the bytes of ``piece``."""
    strides = torch.empty_like(like, device="meta").stride()
    return piece.view(like.dtype).as_strided(like.shape, strides)


def _allocated(nbytes: int, allocate: Allocate) -> Tensor:
    try:
        return allocate(nbytes)
    except MemoryError as failure:
        logger.warning(
            "no pinned memory for %d more bytes (%s); ordinary memory is used, whose copies are "
            "slower and block; raise the limit of locked memory (ulimit -l)",
            nbytes,
            failure,
        )
        return pageable(nbytes)
