"""Streams and events while a graph is captured, by any program code.

While a graph is captured nothing runs. An event from before the capture, or of another capture, can
be neither queried nor waited for. Neither wait is needed: a capture begins by synchronizing, so
earlier work is done, and work of another capture is ordered by the launches of the two graphs. So
such waits are skipped. Outside of captures, streams and events are the device's own.

    live, d2h = backend.current_stream(), backend.d2h
    if backend.is_capturing:
        live, d2h = captured(backend, live, d2h)
    d2h.wait_event(live.record_event())
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from pp_offload.backends.base import Backend, Event, Stream
from pp_offload.errors import NotWhileCapturingError


class CapturedEvent(torch.Event):
    """An event that was recorded in a capture of ``owner``, a backend.

    Only a launch of the graph reaches it. Outside of the capture it is a ``torch.Event`` that was
    never recorded, and PyTorch's streams do not wait for such an event.
    """

    capture: int
    inner: Event
    owner: Any

    @classmethod
    def of(cls, inner: Event, capture: int, owner: Any) -> CapturedEvent:
        event = cls(device="cpu")  # never recorded, so the device does not matter
        event.capture, event.inner, event.owner = capture, inner, owner
        return event

    def query(self) -> bool:
        """False in its own capture, where nothing runs; else True: only a launch would reach it."""
        return self.capture != self.owner.capture_id()

    def synchronize(self) -> None:
        pass


@dataclass(frozen=True)
class CapturedStream:
    """A stream as part of a capture. It differs from the same stream in another capture, so that
    memory of one graph is not used by the next.
    """

    inner: Stream
    capture: int
    owner: Any = field(compare=False)

    def wait_event(self, event: Event) -> None:
        """Let no later work run before ``event``, if the event is of the same capture."""
        if isinstance(event, CapturedEvent) and event.capture == self.capture:
            self.inner.wait_event(event.inner)

    def record_event(self) -> CapturedEvent:
        return CapturedEvent.of(self.inner.record_event(), self.capture, self.owner)


def captured(backend: Backend, *streams: Stream) -> list[Any]:
    """Return these streams as parts of the running capture. Each joins it with its first wait.

    A backend with captures has two more methods: ``capture_id()`` is the number of the capture of
    the current stream, 0 outside; ``captures_on(stream)`` is whether a stream is part of a capture.
    """
    owner: Any = backend
    capture = owner.capture_id()
    return [CapturedStream(stream, capture, owner) for stream in streams]


def those_captured(backend: Backend, streams: Iterable[Stream]) -> list[Any]:
    """Wrap those of ``streams`` that are already part of the running capture."""
    owner: Any = backend
    return captured(backend, *filter(owner.captures_on, streams))


def no_memory_in_captures(nbytes: int) -> NotWhileCapturingError:
    """Return the error of a capture that asks for host memory not made before."""
    return NotWhileCapturingError(
        f"{nbytes} bytes of host memory cannot be made while a graph is captured; run a step with "
        "offload before capturing"
    )
