"""Acquiring host memory in slabs, within a budget, with or without pinning.

Slabs are powers of two, since PyTorch's pinned allocator rounds every block up to one. Several of
them make up any size closely: 11 MiB are 8 + 2 + 1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from pp_offload._memory.budget import HostBudget, Reserved
from pp_offload._memory.host_pool import pageable as pageable
from pp_offload.errors import NotWhileCapturingError

logger = logging.getLogger(__name__)

SMALLEST_BYTES = 2**16
"""No slab is smaller, but where the last of a budget is taken."""

FINENESS = 64
"""The slabs that make up a size exceed it by less than one part in this many."""

Allocate = Callable[[int], Tensor]


class Slab:
    """Host memory, counted in a budget for as long as anybody refers to this object.

    Attributes:
        reserved: Its part of the budget.
    """

    __slots__ = ("data", "nbytes", "reserved")

    def __init__(self, data: Tensor, reserved: Reserved | None) -> None:
        self.data = data
        self.nbytes = data.numel()
        self.reserved = reserved


class SlabSource:
    """Where slabs come from.

    Args:
        allocate: Gives a flat ``uint8`` host tensor, pinned where the device can use that, or
            raises MemoryError.
        budget: What the process may take.
    """

    def __init__(self, allocate: Allocate, budget: HostBudget) -> None:
        self.budget = budget
        self.num_allocations = 0
        self._allocate = allocate
        self._is_pageable = False

    def acquire(self, nbytes: int, granule: int) -> list[Slab]:
        """Slabs that hold ``nbytes`` together, none smaller than ``granule`` unless pinning fails.

        Memory that can be pinned only in smaller pieces comes in smaller pieces. When even those
        fail, ordinary memory is used from then on, with one warning.

        Raises:
            MemoryError: They would be over the budget, and nothing was asked for; or the system has
                no more.
        """
        slabs: list[Slab] = []
        sizes = list(reversed(list(powers_of_two(nbytes, granule))))
        if sum(sizes) > self.budget.left_bytes:
            raise self._over_budget(sum(sizes))
        while sizes:
            size = sizes.pop()
            slab = self._slab(size)
            if slab is not None:
                slabs.append(slab)
            elif size > SMALLEST_BYTES:
                sizes += [size // 2, size // 2]
            else:
                self._fall_back(nbytes)
                sizes.append(size)
        return slabs

    def acquire_whole(self, nbytes: int, *, force: bool = False) -> Slab:
        """One slab of at least ``nbytes``; ordinary memory if so much cannot be pinned together.

        Args:
            nbytes: At least one.
            force: Take it also over the budget.

        Raises:
            MemoryError: It would be over the budget, or the system has no more.
        """
        size = whole_slab_bytes(nbytes)
        slab = self._slab(size, force=force)
        if slab is None:
            self._fall_back(size)
            slab = self._slab(size, force=force)
        assert slab is not None
        return slab

    def _over_budget(self, nbytes: int) -> MemoryError:
        return MemoryError(
            f"{nbytes} more bytes of host memory would be over the budget of this process: "
            f"{self.budget.left_bytes} of {self.budget.limit_bytes} bytes are left; "
            f"{self.budget.advice}"
        )

    def _slab(self, nbytes: int, *, force: bool = False) -> Slab | None:
        """One slab; None if it cannot be pinned."""
        reserved = self.budget.reserve(nbytes, force=force)
        if reserved is None:
            raise self._over_budget(nbytes)
        self.num_allocations += 1
        try:
            data = pageable(nbytes) if self._is_pageable else self._allocate(nbytes)
        except MemoryError as failure:
            del reserved  # or the traceback would keep it counted
            if self._is_pageable or isinstance(failure, NotWhileCapturingError):
                raise
            return None
        return Slab(data, reserved)

    def _fall_back(self, nbytes: int) -> None:
        self._is_pageable = True
        logger.warning(
            "no pinned memory for %d more bytes; ordinary memory is used from now on, whose copies "
            "are slower and block; raise the limit of locked memory "
            "(ulimit -l), or offload less",
            nbytes,
        )


class _Memory(np.ndarray):
    """Bytes that keep their owner for as long as a storage is on them."""

    owner: object


def owned_by(owner: object, data: Tensor) -> Tensor:
    """The bytes of flat ``uint8`` host memory as a storage that alone keeps ``owner``."""
    memory = data.numpy().view(_Memory)
    memory.owner = owner
    return torch.frombuffer(memory, dtype=torch.uint8)


def whole_slab_bytes(nbytes: int) -> int:
    """The least power of two that holds ``nbytes`` in one piece."""
    return 1 << (max(nbytes, SMALLEST_BYTES) - 1).bit_length()


def powers_of_two(nbytes: int, granule: int) -> Iterator[int]:
    """The fewest powers of two that make up ``nbytes``, rounded up to a multiple of ``granule``.

    Largest first. ``granule`` is a power of two.
    """
    left = -(-nbytes // granule) * granule
    while left:
        size = 1 << (left.bit_length() - 1)
        yield size
        left -= size


def granule_for(nbytes: int) -> int:
    """The smallest slab worth having in a tier of ``nbytes``."""
    return max(SMALLEST_BYTES, 1 << max(0, (nbytes // FINENESS).bit_length() - 1))
