"""Count of device memory, by purpose, as the host allocates and frees it.

A caching allocator returns memory to its stream when the host drops the tensor, whatever that
stream has yet to run. So allocated bytes change in the host's order, not by clocks.

    memory = DeviceMemory()
    memory.follow(model, optimizer)
    memory.see(tensor.untyped_storage())
    memory.live_bytes, memory.peak_bytes, memory.at_peak["gradients"]
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

ROUNDING_BYTES = 512
"""Multiple to which device allocators round sizes up."""

OTHER = "other"
CATEGORIES = ("parameters", "gradients", "optimizer", "in flight", "reloaded", OTHER)
"""Purposes of memory; see :meth:`DeviceMemory.name`."""


def rounded(nbytes: int) -> int:
    """Return the bytes that a device allocator takes for ``nbytes``."""
    return -(-nbytes // ROUNDING_BYTES) * ROUNDING_BYTES


class Allocation(weakref.ref[UntypedStorage]):
    """A storage, held weakly, with its size and category."""

    __slots__ = ("category", "key", "nbytes")
    key: int
    nbytes: int
    category: str


class DeviceMemory:
    """Count of the bytes of living storages that were seen, and of ``taken_bytes``."""

    def __init__(self, taken_bytes: int = 0) -> None:
        self._live: Counter[str] = Counter(dict.fromkeys(CATEGORIES, 0))
        self._live[OTHER] = self._live_bytes = self._peak_bytes = taken_bytes
        self._at_peak = dict(self._live)
        self._alive: dict[int, Allocation] = {}
        self._gone: deque[Allocation] = deque()  # a weak reference's callback may only append

    @property
    def live_bytes(self) -> int:
        """Bytes of the storages alive."""
        self._free_gone()
        return self._live_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at a time."""
        self._free_gone()
        return self._peak_bytes

    @property
    def live(self) -> dict[str, int]:
        """Bytes of each of :data:`CATEGORIES`, which add up to :attr:`live_bytes`."""
        self._free_gone()
        return dict(self._live)

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes of each of :data:`CATEGORIES` at the peak, by the names given until then."""
        return dict(self._at_peak)

    def take_peak(self) -> int:
        """Return the peak since the last call, or since the beginning."""
        self._free_gone()
        peak, self._peak_bytes = self._peak_bytes, self._live_bytes
        self._at_peak = dict(self._live)
        return peak

    def see(self, storage: UntypedStorage) -> Allocation:
        """Count a storage on the device, unless it is counted with the same size."""
        self._free_gone()
        key, nbytes = storage._cdata, rounded(storage.nbytes())
        allocation = self._alive.get(key)
        if allocation is None or allocation() is not storage:
            allocation = self._alive[key] = Allocation(storage, self.dies)
            allocation.key, allocation.nbytes, allocation.category = key, 0, OTHER
        if allocation.nbytes != nbytes:  # it is new, or was resized
            self._add(allocation.category, nbytes - allocation.nbytes)
            allocation.nbytes = nbytes
        return allocation

    def dies(self, allocation: Allocation) -> None:
        """Free the memory of a dead storage, when bytes are next read."""
        self._gone.append(allocation)

    def _add(self, category: str, nbytes: int) -> None:
        self._live[category] += nbytes
        self._live_bytes += nbytes
        if self._live_bytes > self._peak_bytes:
            self._peak_bytes = self._live_bytes
            self._at_peak = dict(self._live)

    def _free_gone(self) -> None:
        while self._gone:
            allocation = self._gone.popleft()
            self._add(allocation.category, -allocation.nbytes)
            if self._alive.get(allocation.key) is allocation:
                del self._alive[allocation.key]

    def name(self, tensor: Tensor, category: str, *, only_unnamed: bool = False) -> None:
        """Name the purpose of a device tensor's memory, one of :data:`CATEGORIES`, until it is
        freed.
        """
        if tensor.is_meta:
            allocation = self.see(tensor.untyped_storage())
            if only_unnamed and allocation.category != OTHER:
                return
            self._live[allocation.category] -= allocation.nbytes
            self._live[category] += allocation.nbytes
            allocation.category = category

    def follow(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Name a model's parameters and buffers, its gradients, and its optimizer's state.

        Gradients are named when they are complete; the optimizer's state, after each step.
        """
        for tensor in (*model.parameters(), *model.buffers()):
            self.name(tensor, "parameters")
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._name_gradient)
        if optimizer is not None:
            optimizer.register_step_post_hook(self._name_state)

    def _name_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.name(parameter.grad, "gradients")

    def _name_state(self, optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self.name(value, "optimizer")
