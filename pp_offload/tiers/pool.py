"""Reuse tensors of a given shape and dtype instead of allocating them again.

A training step asks for the same shapes over and over, and pinned host memory in particular is
slow to acquire. So a freed tensor waits in the queue of its shape and dtype.

    pool = GPUTensorPool(device="cpu", pin_memory=True)
    tensor = pool.allocate((128, 512), torch.bfloat16)  # contents undefined
    pool.free(tensor)                                   # once nothing reads or writes it any more
    assert pool.allocate((128, 512), torch.bfloat16) is tensor
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import TypedDict

import torch
from torch import Tensor

_Key = tuple[tuple[int, ...], torch.dtype]


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

    NOTE [ Footprint ]. A new tensor is made only when none of its shape and dtype is free. Then
    free tensors of other shapes are let go, the longest unused first, until their bytes cover the
    new one. So the pool never holds more bytes than were once in use at the same time, however
    many shapes come by.

    A tensor is known by its storage, so a view of a pooled tensor frees the whole of it. The pool
    does not order streams: free a tensor only after waiting for the copies that use it. It is not
    safe to call from two threads at once.

    Args:
        device: Where the tensors live.
        pin_memory: Page-lock them, for asynchronous copies. Only for host tensors, and without
            effect where there is no CUDA device to copy to.

    Raises:
        ValueError: There is no such device, or ``pin_memory`` was asked for device memory.

    Source: Megatron-LM ``GPUTensorPool``.
    """

    def __init__(self, device: str = "cuda", pin_memory: bool = False) -> None:
        self._in_use: dict[int, tuple[_Key, Tensor]] = {}
        self._free: dict[_Key, deque[Tensor]] = {}
        self._free_order: OrderedDict[int, _Key] = OrderedDict()
        self.device = _usable_device(device)
        if pin_memory and self.device.type != "cpu":
            raise ValueError(f"pin_memory=True, device={device!r}; pinned memory is host memory")
        self.pin_memory = pin_memory and torch.accelerator.is_available()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """A contiguous tensor with undefined contents: the longest free one, or else a new one.

        Raises:
            ValueError: A dimension is negative.
        """
        key = self._get_pool_key(shape, dtype)
        tensor = self._pop_free(key) if key in self._free else self._make(key)
        self._in_use[_storage_id(tensor)] = (key, tensor)
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Take a tensor back for reuse.

        Raises:
            ValueError: The tensor is not in use here: it is already free, is not of this pool, or
                the pool was cleared since it was handed out.
        """
        identity = _storage_id(tensor)
        if identity in self._free_order:
            raise ValueError(f"{_describe(tensor)} is already free; free each tensor once")
        if identity not in self._in_use:
            raise ValueError(
                f"{_describe(tensor)} does not belong to this pool; free it where it was allocated."
                " If this pool was cleared since, drop the tensor instead"
            )
        self._recycle(*self._in_use.pop(identity))

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
        in_use = [key for key, _ in self._in_use.values()]
        free = list(self._free_order.values())
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
        for key, tensor in self._in_use.values():
            self._recycle(key, tensor)
        self._in_use.clear()

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
        dimensions = tuple(int(size) for size in shape)
        if any(size < 0 for size in dimensions):
            raise ValueError(f"shape {dimensions} has a negative dimension; pass zero or more")
        return dimensions, dtype

    @staticmethod
    def _calculate_memory_size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return math.prod(shape) * dtype.itemsize

    def _make(self, key: _Key) -> Tensor:
        self._let_go_of_others(self._calculate_memory_size(*key))
        shape, dtype = key
        return torch.empty(shape, dtype=dtype, device=self.device, pin_memory=self.pin_memory)

    def _let_go_of_others(self, needed_bytes: int) -> None:
        """See NOTE [ Footprint ]. Each tensor is let go of once, so this is amortised O(1)."""
        while needed_bytes > 0 and self._free_order:
            key = next(iter(self._free_order.values()))
            self._pop_free(key)
            needed_bytes -= self._calculate_memory_size(*key)

    def _pop_free(self, key: _Key) -> Tensor:
        queue = self._free[key]
        tensor = queue.popleft()
        if not queue:
            del self._free[key]
        del self._free_order[_storage_id(tensor)]
        return tensor

    def _recycle(self, key: _Key, tensor: Tensor) -> None:
        """Queue a tensor that is still what was handed out; one that was resized is dropped."""
        has_changed = tuple(tensor.shape) != key[0] or not tensor.is_contiguous()
        if has_changed or tensor.untyped_storage().nbytes() < self._calculate_memory_size(*key):
            return
        if tensor.requires_grad:  # its autograd history would keep a whole graph alive
            tensor = tensor.detach()
        self._free.setdefault(key, deque()).append(tensor)
        self._free_order[_storage_id(tensor)] = key

    def _forget_all(self) -> None:
        self._in_use.clear()
        self._free.clear()
        self._free_order.clear()

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


def _usable_device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not torch.accelerator.is_available():
        raise ValueError(f"device={name!r}, and torch finds no CUDA device; pass device='cpu'")
    return device


def _storage_id(tensor: Tensor) -> int:
    """Names a storage while it is alive; zero-size tensors have no address to tell them apart."""
    return tensor.untyped_storage()._cdata


def _describe(tensor: Tensor) -> str:
    return f"tensor of shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"
