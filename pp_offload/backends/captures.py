"""Streams and events while a graph is captured, whoever captures it.

While a graph is captured nothing runs. An event from before the capture can then be neither queried
nor waited for, and an event of another capture never. Neither wait is needed: work from before is
done, for a capture begins by synchronizing, and what another capture queued comes before or after
as its graph is launched. So such waits are left out. Outside of captures streams and events are the
device's own, and cost nothing more.

    live, d2h = backend.current_stream(), backend.d2h
    if backend.is_capturing:
        live, d2h = captured(backend, live, d2h)
    d2h.wait_event(live.record_event())
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, cast

import torch

from pp_offload.backends.base import Backend, Event, Stream


class CapturingBackend(Backend, Protocol):
    """A backend that knows of captures."""

    def capture_id(self) -> int:
        """The number of the capture that the current stream is part of; 0 outside."""
        ...

    def captures_on(self, stream: Stream) -> bool:
        """Whether a stream, which need not be the current one, is part of a capture."""
        ...


class CapturedEvent(torch.Event):
    """An event that was recorded in a capture.

    For everybody outside it is an event that was never recorded, which PyTorch's streams take for
    one that has passed: only a launch of the graph reaches it.
    """

    capture: int
    inner: Event
    owner: CapturingBackend

    @classmethod
    def of(cls, inner: Event, capture: int, owner: CapturingBackend) -> CapturedEvent:
        """Wrap ``inner``."""
        event = cls(device="cpu")  # never recorded, so the device does not matter
        event.capture, event.inner, event.owner = capture, inner, owner
        return event

    def query(self) -> bool:
        """Whether nothing before it will run without a launch: False in its own capture."""
        return self.capture != self.owner.capture_id()

    def synchronize(self) -> None:
        """Return at once."""


class CapturedStream:
    """A stream as part of a capture; the same one in two captures is not equal, so that memory of
    one graph is not used by the next.
    """

    __slots__ = ("capture", "inner", "owner")

    def __init__(self, inner: Stream, capture: int, owner: CapturingBackend) -> None:
        self.inner = inner
        self.capture = capture
        self.owner = owner

    def wait_event(self, event: Event) -> None:
        """Let nothing queued from now on run before ``event``, if that is of the same capture."""
        if isinstance(event, CapturedEvent) and event.capture == self.capture:
            self.inner.wait_event(event.inner)

    def record_event(self) -> CapturedEvent:
        """A new event after everything queued so far."""
        return CapturedEvent.of(self.inner.record_event(), self.capture, self.owner)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CapturedStream):
            return False
        return self.inner == other.inner and self.capture == other.capture

    def __hash__(self) -> int:
        return hash((self.inner, self.capture))


def captured(backend: Backend, *streams: Stream) -> list[Any]:
    """These streams as parts of the capture that goes on. One that is not part of it yet joins it
    with its first wait.
    """
    owner = cast(CapturingBackend, backend)
    capture = owner.capture_id()
    return [CapturedStream(stream, capture, owner) for stream in streams]


def those_captured(backend: Backend, streams: Iterable[Stream]) -> list[Any]:
    """Those of the streams that are part of the capture that goes on."""
    owner = cast(CapturingBackend, backend)
    return captured(backend, *filter(owner.captures_on, streams))


def no_memory_in_captures(nbytes: int) -> str:
    """The message where a capture asks for host memory that is not there."""
    return (
        f"{nbytes} bytes of host memory cannot be made while a graph is captured; run a step with "
        "offload before capturing"
    )
