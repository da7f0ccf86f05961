"""A backend: streams, events and copies on one kind of device.

The transfer engine is written against these protocols. ``torch.Stream`` and ``torch.Event`` satisfy
:class:`Stream` and :class:`Event` as they are, so an accelerator needs no wrapping.

    event = backend.d2h.record_event()          # behind all work queued on d2h
    backend.current_stream().wait_event(event)  # compute goes on only behind the event

NOTE [ Captures ]
    While a graph is captured nothing runs. An event from before the capture, or of another capture,
    can be neither queried nor waited for. Neither wait is needed: a capture begins by
    synchronizing, so earlier work is done, and work of another capture is ordered by the launches
    of the two graphs. So such waits are skipped, by :func:`captured` streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from pp_offload.errors import NotWhileCapturingError


class Event(Protocol):
    """A point in one stream's order."""

    def query(self) -> bool:
        """Whether everything before this point has finished, as far as the host can tell."""

    def synchronize(self) -> None:
        """Block the host until everything before this point has finished."""


class TimedEvent(Event, Protocol):
    """An event that knows when the stream passed it."""

    def elapsed_time(self, end: Any, /) -> float:
        """Return milliseconds from here to ``end``, another event; both must have been passed."""


class Stream(Protocol):
    """A queue of work that runs in order."""

    def wait_event(self, event: Event) -> None:
        """Let nothing queued from now on run before ``event``. The host does not block."""

    def record_event(self) -> Event:
        """Return a new event behind everything queued so far."""


class Allocated(NamedTuple):
    """Bytes of device memory.

    Attributes:
        nbytes: Bytes that tensors have now.
        peak_bytes: Most bytes that tensors had since the peak was last reset.
        reserved_bytes: Bytes that the allocator holds for tensors, if it counts them.
        num_retries: How often the allocator gave memory back to get more, if it counts that.
    """

    nbytes: int
    peak_bytes: int
    reserved_bytes: int = 0
    num_retries: int = 0


@runtime_checkable
class Backend(Protocol):
    """One device: its live compute stream, two copy streams, and host memory for them.

    A class that extends this inherits defaults for what most devices do not need.
    """

    name: str
    """Name in messages: ``cpu``, ``simulated late``, ``cuda:0``."""

    device: torch.device
    """Device of tensors; a reload allocates on it."""

    is_host: bool
    """Whether device tensors are ordinary host memory."""

    @property
    def is_capturing(self) -> bool:
        """Whether work queued now becomes part of a graph instead of being run."""

    d2h: Stream
    """Stream of copies from device to host, in order."""

    h2d: Stream
    """Stream of copies from host to device, in order."""

    if TYPE_CHECKING:  # at run time a property would hide an instance's attribute

        @property
        def current_stream(self) -> Callable[[], Stream]:
            """The compute stream that is current now, on the calling thread. Never cache it."""

    def timed_event(self, stream: Stream) -> TimedEvent | None:
        """Return a new event behind everything queued so far; None on a device without a clock."""
        return None

    def memory_bytes(self) -> int | None:
        """Return bytes of device memory that tensors of this process may have; None if unknown."""
        return None

    def allocated(self) -> Allocated | None:
        """Return device memory that tensors have; None if unknown. Takes tens of microseconds."""
        return None

    def copy(
        self, stream: Stream, targets: list[Tensor], sources: list[Tensor], label: str
    ) -> None:
        """Queue ``targets[i].copy_(sources[i])`` for all ``i`` on ``stream``.

        The caller keeps targets and sources alive until an event behind the copies has passed.

        Args:
            stream: :attr:`d2h` or :attr:`h2d`.
            targets, sources: Tensors of the same shapes and dtypes. No target overlaps another.
            label: The group these bytes belong to, for messages.
        """

    def allocate_host(self, nbytes: int) -> Tensor:
        """Return a flat ``uint8`` host tensor that :meth:`copy` can use asynchronously.

        Raises:
            MemoryError: The host cannot give ``nbytes``, or a graph is captured.
        """

    def trim_host(self) -> None:
        """Return freed host memory of this backend to the system."""
        return

    def joined(self) -> None:
        """Called when compute has just waited for both copy streams, as at the end of a capture."""
        return

    def activate(self) -> AbstractContextManager[object]:
        """Return a context to enter while this backend is in use; most backends need none."""
        return nullcontext()

    def synchronize(self) -> None:
        """Block the host until both copy streams are empty."""
        for stream in (self.d2h, self.h2d):
            stream.record_event().synchronize()


S = TypeVar("S", bound=Stream)


class HasLiveStream(Backend, Generic[S]):
    """A device unknown to PyTorch: the backend has the current stream, for one thread."""

    _current: S

    def current_stream(self) -> S:
        return self._current

    @contextmanager
    def stream(self, stream: S) -> Iterator[S]:
        """Make ``stream`` the live compute stream inside."""
        previous, self._current = self._current, stream
        try:
            yield stream
        finally:
            self._current = previous


class CapturedEvent(torch.Event):
    """An event that was recorded in a capture of ``owner``, a backend.

    Only a launch of the graph reaches it. Outside of the capture it is a ``torch.Event`` that was
    never recorded, and PyTorch's streams do not wait for such an event.
    """

    capture: int
    inner: Event
    owner: Any

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
        event = CapturedEvent(device="cpu")  # never recorded, so the device does not matter
        event.inner, event.capture = self.inner.record_event(), self.capture
        event.owner = self.owner
        return event


def captured(backend: Backend, *streams: Stream) -> list[Any]:
    """Return these streams as parts of the running capture. Each joins it with its first wait. A
    backend with captures has two more methods: ``capture_id()`` is the number of the capture of the
    current stream, 0 outside; ``captures_on(stream)`` is whether a stream is part of a capture.
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
