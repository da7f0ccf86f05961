"""A backend whose streams may be part of a captured graph, whoever captures it.

While a graph is captured nothing runs. An event from before the capture can then be neither queried
nor waited for, and an event of another capture never. Neither wait is needed: work from before is
done, for a capture begins by synchronizing, and what another capture queued comes before or after
as its graph is launched. So such waits are left out, and a query of an event from before says that
it is not known to be over. And a stream in one capture is not equal to itself in another, so that
memory of one graph is not used by the next.

    backend = GraphSafeBackend(AcceleratorBackend())
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from pp_offload.backends.base import Allocated, Backend, Event, Stream, TimedEvent
from pp_offload.errors import NotWhileCapturingError


class CapturingBackend(Backend, Protocol):
    """A backend that knows of captures."""

    def capture_id(self) -> int:
        """Which capture the current stream is part of; 0 outside."""
        ...


class GraphSafeEvent:
    """An event, and the capture it was recorded in."""

    __slots__ = ("capture", "inner", "owner")

    def __init__(self, inner: Event, capture: int, owner: CapturingBackend) -> None:
        self.inner = inner
        self.capture = capture
        self.owner = owner

    def query(self) -> bool:
        """Whether nothing before it runs, or will run without a new launch of its graph."""
        now = self.owner.capture_id()
        if self.capture:
            return self.capture != now
        return not now and self.inner.query()

    def synchronize(self) -> None:
        """Block the host until it is reached. A captured one is not: only a launch reaches it."""
        if not self.capture:
            self.inner.synchronize()


class GraphSafeStream:
    """A stream, in a capture or outside; the same one in two captures is not equal.

    Args:
        inner: The stream.
        owner: Knows of captures.
        capture: What it was part of when it was current; None for a copy stream, which is part of
            every capture that uses it.
    """

    __slots__ = ("capture", "inner", "owner")

    def __init__(self, inner: Stream, owner: CapturingBackend, capture: int | None) -> None:
        self.inner = inner
        self.owner = owner
        self.capture = capture

    def wait_event(self, event: Event) -> None:
        """Let nothing queued from now on run before ``event``, unless a capture needs no wait."""
        if not isinstance(event, GraphSafeEvent):
            self.inner.wait_event(event)
        elif event.capture == self._capture_now() == self.owner.capture_id():
            self.inner.wait_event(event.inner)

    def record_event(self) -> GraphSafeEvent:
        """A new event after everything queued so far."""
        return GraphSafeEvent(self.inner.record_event(), self._capture_now(), self.owner)

    def _capture_now(self) -> int:
        """The capture that it is part of now; 0 for none."""
        now = self.owner.capture_id()
        return now if self.capture in (None, now) else 0

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, GraphSafeStream)
            and self.inner == other.inner
            and self.capture == other.capture
        )

    def __hash__(self) -> int:
        return hash((self.inner, self.capture))


class GraphSafeBackend:
    """Wraps a backend that knows of captures.

    Args:
        inner: Does the work.
    """

    def __init__(self, inner: CapturingBackend) -> None:
        self.inner = inner
        self.name = inner.name
        self.device = inner.device
        self.is_host = inner.is_host
        self.d2h: Stream = GraphSafeStream(inner.d2h, inner, None)
        self.h2d: Stream = GraphSafeStream(inner.h2d, inner, None)

    @property
    def is_capturing(self) -> bool:
        """Whether what is queued now becomes part of a graph."""
        return self.inner.capture_id() != 0

    def current_stream(self) -> Stream:
        """The live compute stream of the calling thread."""
        return GraphSafeStream(self.inner.current_stream(), self.inner, self.inner.capture_id())

    def timed_event(self, stream: Stream) -> TimedEvent | None:
        """A new event that knows its time. Not to be used in a capture, where nothing runs."""
        return self.inner.timed_event(bare(stream))

    def unused_bytes(self) -> int | None:
        """Device memory that nothing has needed yet."""
        return self.inner.unused_bytes()

    def allocated(self) -> Allocated | None:
        """Device memory that tensors have."""
        return self.inner.allocated()

    def open_disk(self, directory: str | os.PathLike[str] | None) -> Any:
        """A disk that the device has."""
        return self.inner.open_disk(directory)

    def copy(
        self, stream: Stream, targets: list[Tensor], sources: list[Tensor], label: str
    ) -> None:
        """Queue the copies."""
        self.inner.copy(bare(stream), targets, sources, label)

    def allocate_host(self, nbytes: int) -> Tensor:
        """Host memory; while a graph is captured there is only what was there before.

        Raises:
            MemoryError: The host cannot give ``nbytes``.
            NotWhileCapturingError: A graph is captured.
        """
        if self.is_capturing:
            raise NotWhileCapturingError(
                f"{nbytes} bytes of host memory cannot be made while a graph is captured; run a "
                "step with offload before capturing"
            )
        return self.inner.allocate_host(nbytes)

    def trim_host(self) -> None:
        """Give freed host memory back to the system."""
        self.inner.trim_host()

    def activate(self) -> AbstractContextManager[object]:
        """What must be entered while this backend is in use."""
        return self.inner.activate()

    def synchronize(self) -> None:
        """Block the host until both copy streams are empty; not in a capture, where they are."""
        if not self.is_capturing:
            self.inner.synchronize()

    def joined(self) -> None:
        """The copy streams were joined."""
        self.inner.joined()


def bare(stream: Any) -> Any:
    """The stream as PyTorch knows it."""
    return stream.inner if isinstance(stream, GraphSafeStream) else stream


def known_to(backend: Backend, stream: Any) -> Stream:
    """A stream that PyTorch knows, as one that may wait for events of ``backend``.

    PyTorch's own does not look at what it is given to wait for, and takes any object for an event.
    """
    if isinstance(backend, GraphSafeBackend):
        return GraphSafeStream(stream, backend.inner, 0)
    found: Stream = stream
    return found
