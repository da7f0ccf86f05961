"""What Megatron-LM's main asks the manager for where others capture and launch CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch

from pp_offload.backends import Backend, Event, Stream


class GraphState:
    """Of one manager. The stream and the event are made when first asked for.

    Attributes:
        is_in_replay: Whether a graph is launched: only then commits are delayed.
    """

    def __init__(self) -> None:
        self.is_in_replay = False
        self._stream: Any = None
        self._event: Any = None

    def stream(self, backend: Backend) -> Any:
        """The stream that graphs are captured and launched on, of PyTorch's own kind on CUDA.

        A device without graphs gives the live stream.
        """
        if backend.device.type != "cuda":
            return backend.current_stream()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device=backend.device)
        return self._stream

    def event(self, backend: Backend) -> Any:
        """The event recorded at the end of a captured forward and of a captured backward.

        On CUDA an external one, so that what is not captured may wait for it.
        """
        if self._event is None:
            is_cuda = backend.device.type == "cuda"
            self._event = torch.cuda.Event(external=True) if is_cuda else NotedEvent()
        return self._event


class NotedEvent:
    """Stands for an external event on a device that has none: the point it was recorded at last.

    Like one of CUDA, it is made first and recorded later; until then nobody waits for it.
    """

    def __init__(self) -> None:
        self._event: Event | None = None

    def record(self, stream: Stream) -> None:
        """Note what ``stream`` has been given so far."""
        self._event = stream.record_event()

    def wait(self, stream: Stream) -> None:
        """Make ``stream`` wait for what was noted."""
        if self._event is not None:
            stream.wait_event(self._event)
