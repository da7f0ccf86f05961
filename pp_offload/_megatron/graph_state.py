"""Stream and event of CUDA graphs that a program captures and launches, for Megatron's main."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from pp_offload.backends import Backend, Event, Stream


class GraphState:
    """State of CUDA graphs of one manager on its backend.

    Attributes:
        is_in_replay: Whether a graph is being launched; commits are delayed only then.
    """

    def __init__(self, backend: Backend) -> None:
        self.is_in_replay = False
        self._backend = backend

    @property
    def stream(self) -> Any:
        """Stream to capture and launch graphs on; without CUDA, the live stream."""
        is_cuda = self._backend.device.type == "cuda"
        return self._cuda_stream if is_cuda else self._backend.current_stream()

    @cached_property
    def _cuda_stream(self) -> Any:
        return torch.cuda.Stream(device=self._backend.device)

    @cached_property
    def event(self) -> Any:
        """Event recorded at the end of a captured forward and of a captured backward.

        On CUDA an external event, so that work outside the graph may wait for it.
        """
        is_cuda = self._backend.device.type == "cuda"
        return torch.cuda.Event(external=True) if is_cuda else NotedEvent()


class NotedEvent:
    """Replacement of an external event on other devices: made first, and recorded later.

    As on CUDA, a wait before the first record does nothing.
    """

    _event: Event | None = None

    def record(self, stream: Stream) -> None:
        self._event = stream.record_event()

    def wait(self, stream: Stream) -> None:
        if self._event is not None:
            stream.wait_event(self._event)
