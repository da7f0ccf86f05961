"""Gives a module its earlier state back, for a forward that runs again and must change nothing.

Batch norm counts, spectral norm iterates, a router moves its bias: a second run of such a forward
would start from what the first run left, and change it again. So would one that finds a buffer
which was None, or not registered yet.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Module, RReLU
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from pp_offload._checkpoint.plain_attributes import PlainAttributes, Values, put
from pp_offload._common.torch_private import disable_current_modes
from pp_offload._memory.storages import has_storage

SMALL_BYTES = 2**16
"""Up to here any buffer is copied each time. See NOTE [ Changed without a trace ]."""


@dataclass(frozen=True)
class Before:
    """One buffer at the time of the first run."""

    buffer: Tensor
    """The buffer itself."""

    version: int
    """Its version then."""

    values: Tensor
    """A copy of what was in it; of buffers on one storage, views of one copy."""

    is_traced: bool
    """Whether its version tells that it was changed."""

    def is_certainly(self, now: Tensor | None) -> bool:
        """Whether ``now`` is the buffer, and nobody can have changed it."""
        return now is self.buffer and self.is_traced and version_of(self.buffer) == self.version

    def restored(self, now: Tensor | None, copies: _Copies) -> Tensor:
        """The buffer, if ``now`` is that and the same; else a copy of what was in it."""
        if self.is_certainly(now):
            return self.buffer
        if is_lazy(self.values):
            return _copy(self.values)
        return copies.of(self.values).requires_grad_(self.buffer.requires_grad)


@dataclass(frozen=True)
class PartBefore:
    """One module without its parts, at the first run."""

    module: Module
    """The module."""

    is_training: bool
    """Its mode then."""

    buffers: dict[str, Before | None]
    """By name, also those that were None. Others were not there yet."""

    attributes: PlainAttributes
    """What may say what is in them."""

    def changed(self, now: _Buffers) -> Iterator[Before]:
        """Buffers of then that may be others now."""
        for name, one in self.buffers.items():
            if one is not None and not one.is_certainly(now.get(name)):
                yield one

    def restored(self, now: _Buffers, copies: _Copies) -> _Buffers:
        """Its buffers of then: those that are the same now, and copies."""
        found = {
            name: one.restored(now.get(name), copies) if one else None
            for name, one in self.buffers.items()
        }
        if self.attributes.is_built:
            found |= {name: one for name, one in now.items() if found.get(name) is None}
        return found

    def then_and_now(self, now: _Buffers) -> tuple[Values, Values]:
        """Its plain attributes, where they may say something of buffers."""
        is_left = not (self.buffers or now) or self.attributes.is_built
        return ({}, {}) if is_left else self.attributes.then_and_now()


_Buffers = dict[str, Tensor | None]
"""Those of one module, by name."""


class ModuleBefore:
    """Modules and all their parts at the first run.

    Args:
        take: Gives the state of some modules as it is now.
        modules: All of them. A lazy one has no state yet: it is taken once the first run has
            initialized it, for the second run does not do that again.
    """

    def __init__(
        self, take: Callable[[Sequence[Module]], list[PartBefore]], modules: Sequence[Module]
    ) -> None:
        self._take = take
        self._lazy = [one for one in modules if _is_uninitialized(one)]
        self._parts = take([one for one in modules if one not in self._lazy])

    @property
    def draws_after_saving(self) -> bool:
        """Whether an operator inside draws its noise when it has saved the memory for it. Who stops
        when all is saved again stops before (pytorch/pytorch#193671).
        """
        return any(isinstance(one.module, RReLU) for one in self._parts)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Around the first run."""
        # Lazy modules have a hook of their own for that, which is there and so runs ahead of this.
        hooks = [one.register_forward_pre_hook(self._note) for one in self._lazy]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, module: Module, args: object) -> None:
        if not any(one.module is module for one in self._parts):
            with disable_current_modes():  # by operator, else these copies would count
                self._parts += self._take([module])

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, they have copies of their state then; afterwards, their present state again."""
        now = [(one, dict(one.module._buffers.items())) for one in self._parts]
        switched = [one.module for one in self._parts if one.module.training != one.is_training]
        copies = _Copies(before.values for one, there in now for before in one.changed(there))
        attributes = [(one.module, one.then_and_now(there)) for one, there in now]
        try:
            for module, (values, _) in attributes:
                put(module, values)
            for one, there in now:
                _put(one.module, one.restored(there, copies))
            for module in switched:
                module.training = not module.training
            yield
        finally:
            for module in switched:
                module.training = not module.training
            for one, there in now:
                _put(one.module, there)
            for module, (_, values) in attributes:
                put(module, values)


class BufferMemory:
    """Takes copies of buffers. Copies of large ones are shared until the buffer changes."""

    def __init__(self) -> None:
        self._copies = WeakTensorKeyDictionary()

    def of(self, modules: Iterable[Module]) -> ModuleBefore:
        """The state of modules and all their parts as it is now."""
        parts = {id(part): part for one in modules for part in one.modules()}
        return ModuleBefore(self._take, list(parts.values()))

    def _take(self, parts: Sequence[Module]) -> list[PartBefore]:
        buffers = (buffer for part in parts for buffer in part._buffers.values())
        copies = _Copies(buffer for buffer in buffers if buffer is not None)
        with torch.no_grad():
            return [self._part(one, copies) for one in parts]

    def _part(self, part: Module, copies: _Copies) -> PartBefore:
        hidden = part._non_persistent_buffers_set
        buffers = {
            name: None if one is None else self._buffer(one, name not in hidden, copies)
            for name, one in part._buffers.items()
        }
        return PartBefore(part, part.training, buffers, PlainAttributes(part))

    def _buffer(self, buffer: Tensor, is_state: bool, copies: _Copies) -> Before:
        is_traced = _is_traced(buffer, is_state) and not copies.is_shared(buffer)
        values = self._shared(buffer) if is_traced else copies.of(buffer)
        return Before(buffer, version_of(buffer), values, is_traced)

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


def _put(module: Module, buffers: _Buffers) -> None:
    """Have these buffers in a module, in this order, and no others."""
    there = module._buffers
    if list(there.keys()) != list(buffers):  # those of a scripted module never change
        there.clear()
    for name, one in buffers.items():
        there[name] = one


def version_of(tensor: Tensor) -> int:
    """How often it was changed in place; 0 for one that does not count that, for inference or
    without a shape yet.
    """
    return 0 if is_lazy(tensor) or tensor.is_inference() else tensor._version


def _is_uninitialized(module: Module) -> bool:
    return isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()


def _copy(tensor: Tensor) -> Tensor:
    if is_lazy(tensor):  # somebody's own, for of a lazy module there are none by now
        data, kind = tensor.data, cast(Callable[..., Tensor], type(tensor))
        return kind(tensor.requires_grad, data.device, data.dtype)
    return tensor.detach().clone()


def _storage_key(tensor: Tensor) -> object:
    return tensor.untyped_storage()._cdata if has_storage(tensor) else id(tensor)


def _is_traced(buffer: Tensor, is_state: bool) -> bool:
    if not has_storage(buffer) or buffer.nbytes <= SMALL_BYTES or buffer.dim() <= 1:
        return False
    return not (is_state and (buffer.is_floating_point() or buffer.is_complex()))
