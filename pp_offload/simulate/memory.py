"""How much device memory is allocated, as the host allocates and frees it, and for what.

A caching allocator gives memory back to its stream when the host lets go of the tensor, whatever
that stream has still to run. So allocated bytes change in the host's order, not by clocks.

    memory = DeviceMemory()
    memory.follow(model, optimizer)
    memory.see(tensor.untyped_storage())
    memory.live_bytes, memory.peak_bytes, memory.at_peak["gradients"]
"""

from __future__ import annotations

import heapq
import weakref
from collections import Counter, deque
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from pp_offload._common.checks import said
from pp_offload._core.group import Group, GroupState
from pp_offload._core.observer import Observer
from pp_offload._core.payloads import Payloads
from pp_offload._groups.manager import Manager
from pp_offload.simulate.clocks import VirtualEvent, VirtualStream

ROUNDING_BYTES = 512
"""Device allocators round what is asked for up to this."""

OTHER = "other"
CATEGORIES = ("parameters", "gradients", "optimizer", "kept", "in flight", "reloaded", OTHER)
"""What memory is for; see :meth:`DeviceMemory.name`."""


class _Allocation(weakref.ref[UntypedStorage]):
    """A storage, held weakly, and what is known of it when it is gone."""

    __slots__ = ("category", "key", "nbytes")
    key: int
    nbytes: int
    category: str


class _Shared(_Allocation):
    """One that other streams use; see :meth:`DeviceMemory.record_stream`."""

    __slots__ = ("streams",)
    streams: set[VirtualStream]


class DeviceMemory:
    """Counts the bytes of storages that were seen and are alive.

    Args:
        taken_bytes: That are in use all the time.
    """

    def __init__(self, taken_bytes: int = 0) -> None:
        self._live: Counter[str] = Counter(dict.fromkeys(CATEGORIES, 0))
        self._live[OTHER] = self._live_bytes = self._peak_bytes = taken_bytes
        self._at_peak = dict(self._live)
        self._alive: dict[int, _Allocation] = {}
        self._gone: deque[_Allocation] = deque()
        self._in_use: list[tuple[float, int, VirtualEvent, _Shared]] = []

    @property
    def live_bytes(self) -> int:
        """Of the storages alive."""
        self._forget_gone()
        return self._live_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at a time."""
        self._forget_gone()
        return self._peak_bytes

    @property
    def live(self) -> dict[str, int]:
        """Bytes of each of :data:`CATEGORIES`, which add up to :attr:`live_bytes`."""
        self._forget_gone()
        return dict(self._live)

    @property
    def at_peak(self) -> dict[str, int]:
        """The same for :attr:`peak_bytes`, as it was known then."""
        return dict(self._at_peak)

    def take_peak(self) -> int:
        """The most since this was last called."""
        self._forget_gone()
        peak, self._peak_bytes = self._peak_bytes, self._live_bytes
        self._at_peak = dict(self._live)
        return peak

    def see(self, storage: UntypedStorage) -> None:
        """A storage on the device: count it, unless it is known and has the same size."""
        self._seen(storage)

    def _seen(self, storage: UntypedStorage) -> _Allocation:
        self._forget_gone()
        key, nbytes = storage._cdata, -(-storage.nbytes() // ROUNDING_BYTES) * ROUNDING_BYTES
        one = self._alive.get(key)
        if one is None or one() is not storage:
            one = self._alive[key] = _Allocation(storage, self._gone.append)
            one.key, one.nbytes, one.category = key, 0, OTHER
        if one.nbytes != nbytes:  # it is new, or was resized
            self._add(one.category, nbytes - one.nbytes)
            one.nbytes = nbytes
        return one

    def _add(self, category: str, nbytes: int) -> None:
        self._live[category] += nbytes
        self._live_bytes += nbytes
        if self._live_bytes > self._peak_bytes:
            self._peak_bytes = self._live_bytes
            self._at_peak = dict(self._live)

    def record_stream(self, tensor: Tensor, stream: VirtualStream) -> None:
        """Another stream uses its memory, which is free only when that stream has come so far.

        As caching allocators do it: when the tensor is gone, an event is recorded on the stream,
        behind all that was launched there; and when the host next allocates, memory whose event has
        passed is free. Until then it counts, under the same name.
        """
        storage = tensor.untyped_storage()
        one = self._seen(storage)
        if not isinstance(one, _Shared):  # the old reference is dropped, and its callback with it
            shared = _Shared(storage, self._hold)
            shared.key, shared.nbytes, shared.category = one.key, one.nbytes, one.category
            shared.streams = set()
            self._alive[one.key] = one = shared
        one.streams.add(stream)

    def _hold(self, one: _Shared) -> None:
        # Called when the storage dies, not later: what is launched after that is not waited for.
        events = (stream.record_event() for stream in one.streams)
        last = max(events, key=lambda event: event.time_s)
        heapq.heappush(self._in_use, (last.time_s, id(one), last, one))

    def _forget_gone(self) -> None:
        while self._in_use and self._in_use[0][2].query():
            self._gone.append(heapq.heappop(self._in_use)[3])
        while self._gone:
            one = self._gone.popleft()
            self._add(one.category, -one.nbytes)
            if self._alive.get(one.key) is one:
                del self._alive[one.key]

    def name(self, tensor: Tensor, category: str) -> None:
        """Say what the memory of a tensor on the device is for, until it is free.

        Raises:
            ValueError: There is no such category.
        """
        if category not in CATEGORIES:
            raise ValueError(
                f"category is {said(category)}, expected one of {', '.join(map(repr, CATEGORIES))}"
            )
        if tensor.is_meta:
            one = self._seen(tensor.untyped_storage())
            self._live[one.category] -= one.nbytes
            self._live[category] += one.nbytes
            one.category = category

    def name_copied(self, tensor: Tensor, category: str) -> None:
        """The same for what the engine copies or keeps, unless more is known of it."""
        if tensor.is_meta and self._seen(tensor.untyped_storage()).category == OTHER:
            self.name(tensor, category)

    def follow(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Name a model's parameters and buffers, its gradients, and its optimizer's state.

        Gradients are named when they are complete; the optimizer's state, after each of its steps.
        """
        for parameter in model.parameters():
            self.name(parameter, "parameters")
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._name_gradient)
        for buffer in model.buffers():
            self.name(buffer, "parameters")
        if optimizer is not None:
            self.follow_optimizer(optimizer)

    def follow_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Name an optimizer's state, after each of its steps."""
        optimizer.register_step_post_hook(self._name_state)

    def follow_groups(self, manager: Manager) -> None:
        """Name what groups keep on the device, of a manager whose options do not change."""
        manager.offloader.observers.add(_KeptNames(self))

    def _name_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.name(parameter.grad, "gradients")

    def _name_state(self, optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self.name(value, "optimizer")


class _KeptNames(Observer):
    """Names what a group keeps on the device."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory

    def closed(self, group: Group, payloads: Payloads | None) -> None:
        if payloads is not None and group.state.value == GroupState.KEPT.value:
            for tensor in payloads.tensors:
                self._memory.name_copied(tensor, "kept")
