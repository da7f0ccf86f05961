"""A module's buffers as they were: for a forward that is run again, and must change nothing twice.

Batch norm counts, spectral norm iterates, a router moves its bias: running such a forward again
would start from what the first run left, and leave more.

    before = memory.of(module)   # ahead of the first run
    with before.restored():      # around every other one
        module(x)

NOTE [ Changed without a trace ]
    Batch norm changes its statistics without their version counters telling. So buffers of one
    dimension, as those are, and small ones are copied each time. Another, such as a mask, is copied
    when its version says that it changed, and the copy, which stays as long as it is good, is
    shared by all that want it as it is now.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.weak import WeakTensorKeyDictionary

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
    """A copy of what was in it."""

    is_traced: bool
    """Whether its version tells that it was changed."""

    @property
    def is_certainly_same(self) -> bool:
        """Whether the buffer is there and nobody can have changed it."""
        is_there = self.owner.get(self.name) is self.buffer
        return is_there and self.is_traced and self.buffer._version == self.version


@dataclass(frozen=True)
class BuffersBefore:
    """All buffers of a module at the time of the first run."""

    buffers: tuple[Before, ...]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the module has its buffers with the values of then; afterwards those of now."""
        now: list[tuple[Before, Tensor | None]] = []
        try:
            for one in self.buffers:
                if not one.is_certainly_same:
                    now.append((one, one.owner.get(one.name)))
                    one.owner[one.name] = one.values.clone()
            yield
        finally:
            for one, buffer in now:
                one.owner[one.name] = buffer


class BufferMemory:
    """Takes copies of buffers. Those of large ones are shared as long as they are good."""

    def __init__(self) -> None:
        self._copies = WeakTensorKeyDictionary()

    def of(self, function: object) -> BuffersBefore:
        """The buffers of a module, or of the module that a method is bound to, as they are now."""
        module = getattr(function, "__self__", function)
        if not isinstance(module, Module):
            return BuffersBefore(())
        with torch.no_grad():
            return BuffersBefore(tuple(self._all_of(module)))

    def _all_of(self, module: Module) -> Iterator[Before]:
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    is_traced = buffer.nbytes > SMALL_BYTES and buffer.dim() > 1
                    values = self._shared(buffer) if is_traced else buffer.clone()
                    yield Before(owner._buffers, name, buffer, buffer._version, values, is_traced)

    def _shared(self, buffer: Tensor) -> Tensor:
        version, values = self._copies.get(buffer, (None, None))
        if values is None or version != buffer._version:
            values = buffer.clone()
            self._copies[buffer] = buffer._version, values
        return values
