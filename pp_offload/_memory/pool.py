"""Reuse tensors of a given shape and dtype instead of allocating them again.

A training step asks for the same shapes over and over, and pinned host memory in particular is
slow to acquire. So a freed tensor waits in the queue of its shape and dtype. The bytes come from an
arena, so that another shape can have what one needs no more. Host memory comes from where the
engine's does, and is counted with it.

    pool = GPUTensorPool(device="cpu", pin_memory=True)
    tensor = pool.allocate((128, 512), torch.bfloat16)  # contents undefined
    pool.free(tensor)                                   # once nothing reads or writes it any more
    assert pool.allocate((128, 512), torch.bfloat16) is tensor
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import TypedDict

import torch
from torch import Tensor

from pp_offload._common.checks import check_flag, check_kind, described, said
from pp_offload._memory.arena import Arena, Range
from pp_offload._memory.budget import HostBudget
from pp_offload._memory.slabs import SlabSource, owned_by, pageable, whole_slab_bytes
from pp_offload._memory.storages import has_storage
from pp_offload.backends import default_backend

_Key = tuple[tuple[int, ...], torch.dtype]

ALIGNMENT = 512
"""Alignment of tensors in a block, in bytes."""


class _Block:
    """A piece of the pool's memory, and the arena that parcels it out."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.make_books(())

    def make_books(self, taken: Iterable[Range | None]) -> None:
        """Make an arena in which these ranges are in use."""
        live = [one for one in taken if one is not None]
        self.arena = Arena.of([self.data.numel()], live, ALIGNMENT)


@dataclass(slots=True, eq=False)
class _Lease:
    """A tensor of the pool, and where its bytes are; one without bytes has no block."""

    tensor: Tensor
    key: _Key
    block: _Block | None = None
    range_: Range | None = None
    freed_at: int = 0
    """How many frees the pool had seen with this one."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is this one, or begins in its bytes."""
        if tensor is self.tensor:
            return True
        begin = self.tensor.data_ptr()
        return begin <= tensor.data_ptr() < begin + self.tensor.nbytes


class PoolStatus(TypedDict):
    """How much a pool, or one queue of it, holds at the moment of asking."""

    num_pools: int
    """Pairs of shape and dtype that hold at least one tensor."""

    total_count: int
    """Tensors held, in use or free."""

    allocated_count: int
    """Tensors handed out and not freed."""

    free_count: int
    """Tensors waiting to be handed out again."""

    total_bytes: int
    """Bytes held, in use or free."""

    allocated_bytes: int
    """Bytes of the tensors handed out and not freed."""

    free_bytes: int
    """Bytes of the tensors waiting to be handed out again."""

    utilization: float
    """``allocated_count / total_count``; 0.0 for an empty pool."""


class GPUTensorPool:
    """Tensors on one device, handed out and taken back in constant time.

    NOTE [ Footprint ]. If no tensor of its shape and dtype is free, a new one is carved from blocks
    of the pool. Before that, free tensors of other shapes are let go, the longest unused first,
    until they have as many bytes as the new one, and more if their bytes do not lie together. So
    tensors never hold more bytes than were once in use at the same time, however many shapes there
    are. If all that does not help, unused blocks go back, and a new one is acquired.

    A tensor is known by its address, so a view of a pooled tensor frees the whole of it. The pool
    does not order streams: free a tensor only after waiting for the copies that use it. It is not
    safe to call from two threads at once. Do not resize the storage of its tensors: it is shared.

    Args:
        device: Where the tensors live.
        pin_memory: Page-lock them, for asynchronous copies. Only for host tensors, and without
            effect where there is no accelerator to copy to.

    Raises:
        ValueError: There is no such device, or ``pin_memory`` was asked for device memory.
        TypeError: ``device`` is no device, and no name of one.

    Source: Megatron-LM ``GPUTensorPool``.
    """

    def __init__(self, device: str = "cuda", pin_memory: bool = False) -> None:
        self._blocks: list[_Block] = []
        self._in_use: dict[int, _Lease] = {}
        self._free: dict[_Key, deque[_Lease]] = {}
        self._keys: dict[_Key, _Key] = {}
        self._num_freed = 0
        self._is_suspect = False
        self.device = _usable_device(device)
        check_flag("pin_memory", pin_memory)
        if pin_memory and self.device.type != "cpu":
            raise ValueError(f"pin_memory=True, device={device!r}; pinned memory is host memory")
        self.pin_memory = pin_memory and torch.accelerator.is_available()
        self._source: SlabSource | None = None
        if self.device.type == "cpu":
            allocate = default_backend().allocate_host if self.pin_memory else pageable
            self._source = SlabSource(allocate, HostBudget())

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """A contiguous tensor with undefined contents: the longest free one, or else a new one.

        Raises:
            ValueError: A dimension is negative.
            TypeError: ``shape`` is no tuple of integers, or ``dtype`` no dtype.
            MemoryError: Host memory would be over this process's share of what there is.
        """
        key = self._get_pool_key(shape, dtype)
        self._begin()
        lease = self._pop_free(key) if key in self._free else self._make(key)
        self._in_use[id(lease.tensor)] = lease
        self._is_suspect = False
        return lease.tensor

    def free(self, tensor: Tensor) -> None:
        """Take a tensor back for reuse.

        Raises:
            ValueError: The tensor is not in use here: it is already free, is not of this pool, or
                the pool was cleared since it was handed out.
            TypeError: It is no tensor.
        """
        self._begin()
        lease = self._in_use.pop(id(tensor), None)
        if lease is None:
            self._is_suspect = False  # or asking for a wrong tensor would count as an interrupt
            lease = self._lease_of_view(tensor)
        self._recycle(lease)
        self._is_suspect = False

    def get_pool_status(
        self, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> PoolStatus:
        """Counts, bytes and utilisation, of the whole pool or of one shape and dtype.

        Returns:
            A dictionary with the keys of :class:`PoolStatus`; all zero for a shape and dtype that
            this pool holds nothing of.

        Raises:
            ValueError: Only one of ``shape`` and ``dtype`` was given.
        """
        in_use = [lease.key for lease in self._in_use.values()]
        free = [lease.key for queue in self._free.values() for lease in queue]
        if shape is None and dtype is None:
            return self._status(in_use, free)
        if shape is None or dtype is None:
            raise ValueError(f"found shape={shape}, dtype={dtype}; pass both, or neither")
        wanted = self._get_pool_key(shape, dtype)
        return self._status([k for k in in_use if k == wanted], [k for k in free if k == wanted])

    def reset(self) -> None:
        """Make every tensor available, also those that nobody freed.

        Whoever still uses one shares its bytes with the next to get it.
        """
        for identity in list(self._in_use):
            self._begin()
            self._recycle(self._in_use.pop(identity))
            self._is_suspect = False

    def clear(self) -> None:
        """Let go of every tensor and give device memory back to the driver.

        A tensor still in use stays valid for whoever holds it, but is no longer this pool's.
        """
        self._forget_all()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def __del__(self) -> None:
        self._forget_all()

    def _get_pool_key(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Key:
        try:
            dimensions = tuple(map(operator.index, shape))
        except TypeError as failure:
            raise TypeError(
                f"shape is {said(shape)}, expected a tuple of integers; write (n,) for one"
            ) from failure
        if dimensions and min(dimensions) < 0:
            raise ValueError(f"shape {dimensions} has a negative dimension; pass zero or more")
        check_kind("dtype", dtype, torch.dtype, "a torch.dtype, such as torch.float32")
        return dimensions, dtype

    @staticmethod
    def _calculate_memory_size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return math.prod(shape) * dtype.itemsize

    def _begin(self) -> None:
        """A change begins. If an interrupt ended the last one, its bytes are found again."""
        if self._is_suspect:
            self._free = {key: queue for key, queue in self._free.items() if queue}
            leases = [*self._in_use.values(), *chain(*self._free.values())]
            for block in self._blocks:
                block.make_books(lease.range_ for lease in leases if lease.block is block)
        self._is_suspect = True

    # Where bytes come from: see NOTE [ Footprint ]

    def _make(self, key: _Key) -> _Lease:
        key = self._keys.setdefault(key, key)  # one object, so that a free touches little memory
        shape, dtype = key
        nbytes = self._calculate_memory_size(shape, dtype)
        if nbytes == 0:
            return _Lease(torch.empty(shape, dtype=dtype, device=self.device), key)
        needed = nbytes
        while needed > 0 and self._free:
            needed -= self._calculate_memory_size(*self._let_go().key)
        block, range_ = self._carve(nbytes)
        return _Lease(_tensor_at(block, range_, key), key, block, range_)

    def _carve(self, nbytes: int) -> tuple[_Block, Range]:
        while True:
            for block in self._blocks:
                range_ = block.arena.allocate(nbytes)
                if range_ is not None:
                    return block, range_
            if not self._free:
                break
            self._let_go()
        self._blocks = [block for block in self._blocks if block.arena.statistics().num_live]
        self._blocks.append(block := _Block(self._acquire(nbytes)))
        range_ = block.arena.allocate(nbytes)
        assert range_ is not None
        return block, range_

    def _acquire(self, nbytes: int) -> Tensor:
        """Memory for a block; host memory counts in the budget for as long as a tensor is on it."""
        if self._source is None:
            size = whole_slab_bytes(nbytes)
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        slab = self._source.acquire_whole(nbytes)
        return owned_by(slab, slab.data)

    def _let_go(self) -> _Lease:
        """Give the bytes of the longest unused tensor back. Each is let go of once."""
        lease = self._pop_free(min(self._free, key=lambda key: self._free[key][0].freed_at))
        if lease.block is not None and lease.range_ is not None:
            lease.block.arena.free(lease.range_)
        return lease

    def _pop_free(self, key: _Key) -> _Lease:
        queue = self._free[key]
        lease = queue.popleft()
        if not queue:
            del self._free[key]
        return lease

    def _recycle(self, lease: _Lease) -> None:
        """Queue a tensor; or a new one on its bytes, if it requires grad or was reshaped."""
        tensor = lease.tensor
        if tensor.requires_grad or tensor.shape != lease.key[0] or not tensor.is_contiguous():
            if lease.block is None or lease.range_ is None:
                return
            lease.tensor = _tensor_at(lease.block, lease.range_, lease.key)
        self._num_freed = lease.freed_at = self._num_freed + 1
        self._free.setdefault(lease.key, deque()).append(lease)

    def _lease_of_view(self, tensor: Tensor) -> _Lease:
        """Take out the lease in whose bytes ``tensor`` begins."""
        check_kind("tensor", tensor, Tensor, "one that allocate() gave")
        if not has_storage(tensor):
            raise self._foreign(tensor)
        for identity, lease in self._in_use.items():
            if lease.holds(tensor):
                return self._in_use.pop(identity)
        if any(lease.holds(tensor) for queue in self._free.values() for lease in queue):
            raise ValueError(f"{_describe(tensor)} is already free; free each tensor once")
        raise self._foreign(tensor)

    def _foreign(self, tensor: Tensor) -> ValueError:
        return ValueError(
            f"{_describe(tensor)} does not belong to this pool; free it where it was allocated."
            " If this pool was cleared since, drop the tensor instead"
        )

    def _forget_all(self) -> None:
        self._in_use.clear()
        self._free.clear()
        self._blocks.clear()
        self._keys.clear()

    def _status(self, in_use: list[_Key], free: list[_Key]) -> PoolStatus:
        total_count = len(in_use) + len(free)
        allocated_bytes, free_bytes = self._sum_bytes(in_use), self._sum_bytes(free)
        return PoolStatus(
            num_pools=len({*in_use, *free}),
            total_count=total_count,
            allocated_count=len(in_use),
            free_count=len(free),
            total_bytes=allocated_bytes + free_bytes,
            allocated_bytes=allocated_bytes,
            free_bytes=free_bytes,
            utilization=len(in_use) / total_count if total_count else 0.0,
        )

    def _sum_bytes(self, keys: Iterable[_Key]) -> int:
        return sum(self._calculate_memory_size(*key) for key in keys)


def _usable_device(name: object) -> torch.device:
    check_kind("device", name, (str, torch.device), "the name of a device, such as 'cpu'")
    try:
        device = torch.device(name)  # type: ignore[call-overload]
    except RuntimeError as failure:
        raise ValueError(f"device={name!r}, expected one such as 'cpu': {failure}") from failure
    if device.type == "cuda" and not torch.accelerator.is_available():
        raise ValueError(f"device={name!r}, and torch finds no CUDA device; pass device='cpu'")
    return device


def _tensor_at(block: _Block, range_: Range, key: _Key) -> Tensor:
    shape, dtype = key
    flat = block.data[range_.offset : range_.offset + range_.requested_nbytes]
    return flat.view(dtype).view(shape).detach()


def _describe(tensor: Tensor) -> str:
    return f"{described(tensor)} on {tensor.device}"
