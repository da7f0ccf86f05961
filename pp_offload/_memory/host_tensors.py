"""Host tensors for a program, whose memory is free again when the last of them is gone.

Each has a storage of its own: ``torch.save`` and ``copy.deepcopy`` take the whole storage of a
tensor, so views of a common one would each take all the others along.

    tensors = host_tensors(likes, pool)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pp_offload._memory.host_pool import HostBytes, HostPool
from pp_offload._memory.storages import owned_by


class Owner:
    """Keeps host memory, counted by the budget even when the pool is gone."""

    __slots__ = ("__weakref__", "host")

    host: HostBytes


def host_tensors(likes: Sequence[Tensor], pool: HostPool, *, force: bool = False) -> list[Tensor]:
    """Return host tensors of the shapes, dtypes and dense layouts of ``likes``; they hold no data.

    Args:
        likes: Tensors on any device.
        pool: Gives the memory. No copy may use its free memory.
        force: Take the memory even if it exceeds the budget.

    Returns:
        Tensors with a storage each. All of the memory is taken as long as one of them lives.

    Raises:
        MemoryError: The pool has no room.
    """
    owner = Owner()
    owner.host = host = pool.take([like.nbytes for like in likes], owner, force=force)
    tensors = []
    for view, like in zip(host.views, likes, strict=True):
        memory = owned_by(owner, view) if view.numel() else view.clone()
        strides = torch.empty_like(like, device="meta").stride()
        tensors.append(memory.view(like.dtype).as_strided(like.shape, strides))
    return tensors
