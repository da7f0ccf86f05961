"""Host tensors for a program, which are free again when it has none of them any more.

Each has a storage of its own: ``torch.save`` and ``copy.deepcopy`` take a tensor's storage as a
whole, and of views of a common one each would take along all the others.

    tensors = host_tensors(likes, pool)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pp_offload._memory.host_pool import HostBytes, HostPool


class Owner:
    """Whoever has this has its host memory."""

    __slots__ = ("__weakref__", "host")

    host: HostBytes
    """Here, so that the budget counts it also when the pool is gone."""


def host_tensors(likes: Sequence[Tensor], pool: HostPool, *, force: bool = False) -> list[Tensor]:
    """Host tensors of the shapes, dtypes and dense layouts of ``likes``; they hold no data.

    Args:
        likes: Tensors on any device.
        pool: Has the memory. No copy may use what it has free.
        force: Take it even over the budget.

    Returns:
        Each with a storage of its own. All of the memory is taken as long as one of them lives.

    Raises:
        MemoryError: The pool has no room.
    """
    owner = Owner()
    owner.host = host = pool.take([like.nbytes for like in likes], owner, force=force)
    return [_on(view, like, owner) for view, like in zip(host.views, likes, strict=True)]


def _on(view: Tensor, like: Tensor, owner: Owner) -> Tensor:
    """A tensor like this one, on the bytes of ``view``."""
    memory = owned_by(owner, view) if view.numel() else view.clone()
    strides = torch.empty_like(like, device="meta").stride()
    return memory.view(like.dtype).as_strided(like.shape, strides)


class _Memory(np.ndarray):
    """Bytes that keep their owner for as long as a storage is on them."""

    owner: object


def owned_by(owner: object, data: Tensor) -> Tensor:
    """The bytes of flat ``uint8`` host memory as a storage that alone keeps ``owner``."""
    memory = data.numpy().view(_Memory)
    memory.owner = owner
    return torch.frombuffer(memory, dtype=torch.uint8)
