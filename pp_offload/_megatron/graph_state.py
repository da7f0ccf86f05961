"""What Megatron-LM's main asks the manager for where others capture and launch CUDA graphs."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from pp_offload.backends import Backend, Event, Stream


class GraphState:
    """Of one manager, on its backend.

    Attributes:
        is_in_replay: Whether a graph is launched: only then commits are delayed.
    """

    def __init__(self, backend: Backend) -> None:
        self.is_in_replay = False
        self._backend = backend

    @property
    def stream(self) -> Any:
        """The stream that graphs are captured and launched on, of PyTorch's own kind on CUDA.

        A device without graphs gives the live stream.
        """
        is_cuda = self._backend.device.type == "cuda"
        return self._cuda_stream if is_cuda else self._backend.current_stream()

    @cached_property
    def _cuda_stream(self) -> Any:
        return torch.cuda.Stream(device=self._backend.device)

    @cached_property
    def event(self) -> Any:
        """The event recorded at the end of a captured forward and of a captured backward.

        On CUDA an external one, so that what is not captured may wait for it.
        """
        is_cuda = self._backend.device.type == "cuda"
        return torch.cuda.Event(external=True) if is_cuda else NotedEvent()


class NotedEvent:
    """Stands for an external event on a device that has none: the point it was recorded at last.

    Like one of CUDA, it is made first and recorded later; until then nobody waits for it.
    """

    _event: Event | None = None

    def record(self, stream: Stream) -> None:
        self._event = stream.record_event()

    def wait(self, stream: Stream) -> None:
        if self._event is not None:
            stream.wait_event(self._event)
