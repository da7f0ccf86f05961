"""Gives a module its earlier state back, for a forward that runs again and must change nothing.

Batch norm counts, spectral norm iterates, a router moves its bias: a second run of such a forward
would start from what the first run left, and change it again.

    before = memory.of([module])   # ahead of the first run
    with before.restored():      # around every later one
        module(x)

NOTE [ Changed without a trace ]
    Batch norm changes its statistics without their version counters telling, and a codebook may be
    changed through ``.data``. So buffers that are small, of one dimension, or floating-point and
    part of the state dict are copied each time. Any other buffer, such as a large mask, is copied
    once, and again when its version says that it changed; forwards in between share the copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Module, RReLU
from torch.utils.weak import WeakTensorKeyDictionary

from pp_offload._memory.storages import has_storage

SMALL_BYTES = 2**16
"""Up to here any buffer is copied each time. See NOTE [ Changed without a trace ]."""


@dataclass(frozen=True)
class Before:
    """One buffer at the time of the first run."""

    owner: dict[str, Tensor | None]
    """The buffers of the module that has it."""

    name: str
    """Its name there."""

    buffer: Tensor
    """The buffer itself."""

    version: int
    """Its version then."""

    values: Tensor
    """A copy of what was in it; of buffers on one storage, views of one copy."""

    is_traced: bool
    """Whether its version tells that it was changed."""

    @property
    def is_certainly_same(self) -> bool:
        """Whether the buffer is there and nobody can have changed it."""
        is_there = self.owner.get(self.name) is self.buffer
        return is_there and self.is_traced and version_of(self.buffer) == self.version


@dataclass(frozen=True)
class ModuleBefore:
    """All buffers of modules, and whether their parts were in training, at the first run."""

    buffers: tuple[Before, ...] = ()
    modes: tuple[tuple[Module, bool], ...] = ()

    @property
    def draws_after_saving(self) -> bool:
        """Whether an operator inside draws its noise when it has saved the memory for it. Who stops
        when all is saved again stops before (pytorch/pytorch#193671).
        """
        return any(isinstance(module, RReLU) for module, _ in self.modes)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, they have copies of their state then; afterwards, their present state again."""
        now = [(one, one.owner.get(one.name)) for one in self.buffers if not one.is_certainly_same]
        switched = [module for module, mode in self.modes if module.training != mode]
        copies = _Copies(one.values for one, _ in now)
        try:
            for one, _ in now:
                fresh = copies.of(one.values)
                one.owner[one.name] = fresh.requires_grad_(one.buffer.requires_grad)
            for module in switched:
                module.training = not module.training
            yield
        finally:
            for module in switched:
                module.training = not module.training
            for one, buffer in now:
                one.owner[one.name] = buffer


class BufferMemory:
    """Takes copies of buffers. Copies of large ones are shared until the buffer changes."""

    def __init__(self) -> None:
        self._copies = WeakTensorKeyDictionary()

    def of(self, modules: Iterable[Module]) -> ModuleBefore:
        """The state of modules and all their parts as it is now."""
        parts = list({id(part): part for one in modules for part in one.modules()}.values())
        with torch.no_grad():
            return ModuleBefore(
                tuple(self._all_of(parts)), tuple((one, one.training) for one in parts)
            )

    def _all_of(self, parts: Sequence[Module]) -> Iterator[Before]:
        buffers = (buffer for owner in parts for buffer in owner._buffers.values())
        copies = _Copies(buffer for buffer in buffers if buffer is not None)
        for owner in parts:
            for name, buffer in owner._buffers.items():
                if buffer is None:
                    continue
                is_state = name not in owner._non_persistent_buffers_set
                is_traced = _is_traced(buffer, is_state) and not copies.is_shared(buffer)
                values = self._shared(buffer) if is_traced else copies.of(buffer)
                version = version_of(buffer)
                yield Before(owner._buffers, name, buffer, version, values, is_traced)

    def _shared(self, buffer: Tensor) -> Tensor:
        version, values = self._copies.get(buffer, (None, None))
        if values is None or version != version_of(buffer):
            values = buffer.clone()
            self._copies[buffer] = version_of(buffer), values
        return values


class _Copies:
    """Copies of tensors; those that share memory share it in their copies."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        distinct = {id(tensor): tensor for tensor in tensors}.values()
        self._uses = Counter(map(_storage_key, distinct))
        self._storages: dict[object, UntypedStorage] = {}
        self._tensors: dict[int, Tensor] = {}

    def is_shared(self, tensor: Tensor) -> bool:
        """Whether another one lies on its storage."""
        return self._uses[_storage_key(tensor)] > 1

    def of(self, tensor: Tensor) -> Tensor:
        """The copy of one of them, each time the same."""
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = (
                self._view(tensor) if self.is_shared(tensor) else _copy(tensor)
            )
        return self._tensors[id(tensor)]

    def _view(self, tensor: Tensor) -> Tensor:
        key = _storage_key(tensor)
        if key not in self._storages:
            flat = tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._storages[key] = flat.clone().untyped_storage()
        geometry = tensor.storage_offset(), tensor.size(), tensor.stride()
        return tensor.new_empty(0).set_(self._storages[key], *geometry)


def version_of(tensor: Tensor) -> int:
    """How often it was changed in place; 0 for an inference tensor, which does not count that."""
    return 0 if tensor.is_inference() else tensor._version


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _storage_key(tensor: Tensor) -> object:
    return tensor.untyped_storage()._cdata if has_storage(tensor) else id(tensor)


def _is_traced(buffer: Tensor, is_state: bool) -> bool:
    if not has_storage(buffer) or buffer.nbytes <= SMALL_BYTES or buffer.dim() <= 1:
        return False
    return not (is_state and (buffer.is_floating_point() or buffer.is_complex()))
