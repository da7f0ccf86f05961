"""What Megatron-LM's main asks the manager for where others capture and launch CUDA graphs.

The stream and the event are made when first asked for, by :mod:`pp_offload._megatron.cuda_graph`;
a process without graphs has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pp_offload.backends import Event, Stream


@dataclass
class GraphState:
    """Of one manager."""

    is_in_replay: bool = False
    """Whether a graph is launched: only then commits are delayed."""

    stream: Any = None
    """The stream graphs are captured and launched on; the device's own kind."""

    event: Any = None
    """Recorded at the end of a captured forward and of a captured backward."""


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

    def query(self) -> bool:
        """Whether it was reached."""
        return self._event is None or self._event.query()
