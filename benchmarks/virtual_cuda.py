"""Lets a program that is written for ``torch.cuda`` run on a virtual device, as far as it goes.

Only what Megatron-Core's module for activation offload asks of it is here: streams, events, pinned
memory, ``record_stream`` and the ranges of a profiler. Tensors stay on ``meta``, and ``backend``
has to be active.

    with backend.activate(), virtual_cuda(backend):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            host.copy_(x, non_blocking=True)  # takes the link's time, on the clock of that stream
        x.record_stream(side)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pp_offload.simulate import VirtualBackend
from pp_offload.simulate.clocks import VirtualEvent, VirtualStream


class CudaEvent(VirtualEvent):
    """One that is made first and recorded later. Until then it has passed, as on CUDA.

    Args:
        backend: On whose live stream it is recorded where no other is given.
    """

    __slots__ = ("_backend",)

    def __init__(self, backend: VirtualBackend) -> None:
        super().__init__(backend.host, 0.0)
        self._backend = backend

    def record(self, stream: VirtualStream | None = None) -> None:
        """Move it behind all that the stream has now. Who waits for it already is not affected."""
        self.time_s = (stream or self._backend.current_stream()).record_event().time_s


class PinnedMemory:
    """Says which host tensors were asked for as pinned; PyTorch itself pins none without CUDA."""

    def __init__(self) -> None:
        self._empty = torch.empty
        self._pinned = WeakIdKeyDictionary()

    def empty(self, *size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        """As ``torch.empty``."""
        tensor = self._empty(*size, **options)
        if pin_memory:
            self._pinned[tensor] = True
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Of the very tensor that was made, and not of its views."""
        return tensor in self._pinned


def _nothing(*args: Any) -> None:
    """What takes no time of a device."""


@contextmanager
def virtual_cuda(backend: VirtualBackend) -> Iterator[None]:
    """Inside, these names of PyTorch mean the virtual device; afterwards what they meant before."""
    pinned = PinnedMemory()

    # A method has to be a function to be bound to its tensor.
    def is_pinned(tensor: Tensor) -> bool:
        return pinned.is_pinned(tensor)

    def record_stream(tensor: Tensor, stream: VirtualStream) -> None:
        backend.memory.record_stream(tensor, stream)

    stand_ins = [
        # Each new stream is ordered with nothing, and has a clock.
        (torch.cuda, "Stream", lambda: backend.new_stream()),
        (torch.cuda, "Event", lambda: CudaEvent(backend)),
        # Operators and copies take time on the stream that is live, whoever made it so.
        (torch.cuda, "current_stream", lambda: backend.current_stream()),
        (torch.cuda, "stream", backend.stream),
        (torch.cuda, "synchronize", backend.synchronize),
        # Without CUDA they raise errors.
        (torch.cuda.nvtx, "range_push", _nothing),
        (torch.cuda.nvtx, "range_pop", _nothing),
        # Without CUDA nothing can be pinned, and the host would wait for every copy back.
        (torch, "empty", pinned.empty),
        (Tensor, "is_pinned", is_pinned),
        # It takes no stream that is not CUDA's. It decides when memory is free: see DeviceMemory.
        (Tensor, "record_stream", record_stream),
    ]
    with ExitStack() as patches:
        for owner, name, stand_in in stand_ins:
            patches.enter_context(patch.object(owner, name, stand_in))
        yield
