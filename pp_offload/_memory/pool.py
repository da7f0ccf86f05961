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
import operator
from collections import defaultdict, deque
from itertools import chain
from typing import TypedDict

import torch
from torch import Tensor

from pp_offload._common.checks import brief, check_flag, check_kind, described
from pp_offload._memory.addresses import outside_inference_mode, owned_by
from pp_offload._memory.budget import HostBudget
from pp_offload._memory.host_pool import pageable
from pp_offload.backends import default_backend

_Key = tuple[tuple[int, ...], torch.dtype]


class PoolStatus(TypedDict):
    """Contents of a pool, or of one of its queues. Allocated tensors are handed out, not freed."""

    num_pools: int  # pairs of shape and dtype that hold at least one tensor
    total_count: int
    allocated_count: int
    free_count: int
    total_bytes: int
    allocated_bytes: int
    free_bytes: int
    utilization: float  # allocated_count / total_count; 0.0 for an empty pool


class GPUTensorPool:
    """Tensors on one device, handed out and taken back in constant time.

    The pool does not order streams: free a tensor only after waiting for the copies that use it. It
    is not safe to call from two threads at once.

    Args:
        device: Device of the tensors.
        pin_memory: Page-lock them, for asynchronous copies. Only for host tensors, and without
            effect where there is no accelerator to copy to.

    Raises:
        ValueError: There is no such device, or ``pin_memory`` was asked for device memory.

    Source: Megatron-LM ``GPUTensorPool``.
    """

    def __init__(self, device: str = "cuda", pin_memory: bool = False) -> None:
        self.device = _usable_device(device)
        check_flag("pin_memory", pin_memory)
        if pin_memory and self.device.type != "cpu":
            raise ValueError(f"pin_memory=True, device={device!r}; pinned memory is host memory")
        self.pin_memory = pin_memory and torch.accelerator.is_available()
        self._budget = HostBudget() if self.device.type == "cpu" else None
        self._in_use: dict[int, tuple[_Key, Tensor]] = {}  # by id of the tensor
        self._free: defaultdict[_Key, deque[Tensor]] = defaultdict(deque)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a contiguous tensor with undefined contents: the longest free one, else a new one.

        Raises:
            MemoryError: Host memory would exceed this process's share of the available memory.
        """
        key = self._get_pool_key(shape, dtype)
        tensor = self._free[key].popleft() if self._free[key] else self._make(*key)
        self._in_use[id(tensor)] = key, tensor
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Take a tensor back for reuse; drop it if it requires grad, or has another shape now.

        Raises:
            ValueError: The tensor is not in use here: it is already free, is not of this pool, or
                the pool was cleared since it was handed out.
        """
        check_kind("tensor", tensor, Tensor, "one that allocate() gave")
        if id(tensor) not in self._in_use:
            what = f"{described(tensor)} on {tensor.device}"
            if any(tensor is each for each in chain(*self._free.values())):
                raise ValueError(f"{what} is already free; free each tensor once")
            raise ValueError(
                f"{what} does not belong to this pool; free the tensor that allocate() gave, and "
                "no view of it. If this pool was cleared since, drop the tensor instead"
            )
        key, _ = self._in_use.pop(id(tensor))
        has_shape = (tuple(tensor.shape), tensor.dtype) == key and tensor.is_contiguous()
        if has_shape and not tensor.requires_grad:
            self._free[key].append(tensor)

    def get_pool_status(
        self, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> PoolStatus:
        """Return counts and bytes of the pool, or of one shape and dtype; all zero without any."""
        if (shape is None) != (dtype is None):
            raise ValueError(f"found shape={shape}, dtype={dtype}; pass both, or neither")
        in_use = [key for key, _ in self._in_use.values()]
        free = [key for key, tensors in self._free.items() for _ in tensors]
        if shape is not None and dtype is not None:
            key = self._get_pool_key(shape, dtype)
            in_use, free = [key] * in_use.count(key), [key] * free.count(key)
        used_bytes = sum(self._calculate_memory_size(*key) for key in in_use)
        free_bytes = sum(self._calculate_memory_size(*key) for key in free)
        return PoolStatus(
            num_pools=len({*in_use, *free}),
            total_count=len(in_use) + len(free),
            allocated_count=len(in_use),
            free_count=len(free),
            total_bytes=used_bytes + free_bytes,
            allocated_bytes=used_bytes,
            free_bytes=free_bytes,
            utilization=len(in_use) / max(1, len(in_use) + len(free)),
        )

    def reset(self) -> None:
        """Make every tensor available, also tensors in use: others may get their bytes."""
        for _, tensor in list(self._in_use.values()):
            self.free(tensor)

    def clear(self) -> None:
        """Let go of every tensor and give device memory back to the driver.

        A tensor still in use stays valid, but is no longer this pool's.
        """
        self._in_use.clear()
        self._free.clear()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def __del__(self) -> None:
        """Exists for the reference, which has this name: tensors are freed with the pool anyway."""

    def _get_pool_key(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Key:
        try:
            dimensions = tuple(map(operator.index, shape))
        except TypeError as failure:
            raise TypeError(
                f"shape is {brief(shape)}, expected a tuple of integers; write (n,) for one"
            ) from failure
        if dimensions and min(dimensions) < 0:
            raise ValueError(f"shape {dimensions} has a negative dimension; pass zero or more")
        check_kind("dtype", dtype, torch.dtype, "a torch.dtype, such as torch.float32")
        return dimensions, dtype

    @staticmethod
    def _calculate_memory_size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return math.prod(shape) * dtype.itemsize

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Make a tensor; host memory is counted for as long as a tensor is on it."""
        nbytes = self._calculate_memory_size(shape, dtype)
        with outside_inference_mode():  # or nobody could write it outside
            if self._budget is None or not nbytes:
                return torch.empty(shape, dtype=dtype, device=self.device)
            reserved = self._budget.reserve(nbytes)
            allocate = default_backend().allocate_host if self.pin_memory else pageable
            return owned_by(reserved, allocate(nbytes)).view(dtype).view(shape)


def _usable_device(name: object) -> torch.device:
    check_kind("device", name, (str, torch.device), "the name of a device, such as 'cpu'")
    try:
        device = torch.device(name)  # type: ignore[call-overload]
    except RuntimeError as failure:
        raise ValueError(f"device={name!r}, expected one such as 'cpu': {failure}") from failure
    if device.type == "cuda" and not torch.accelerator.is_available():
        raise ValueError(f"device={name!r}, and torch finds no CUDA device; pass device='cpu'")
    return device
