"""A backend: streams, events and copies on one kind of device.

The transfer engine is written against these protocols. ``torch.Stream`` and ``torch.Event`` satisfy
:class:`Stream` and :class:`Event` as they are, so an accelerator needs no wrapping.

    event = backend.d2h.record_event()          # after what was queued on d2h
    backend.current_stream().wait_event(event)  # compute goes on only after it
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor


class Event(Protocol):
    """A point in one stream's order."""

    def query(self) -> bool:
        """Whether everything before this point has finished, as far as the host can tell."""

    def synchronize(self) -> None:
        """Block the host until everything before this point has finished."""


class TimedEvent(Event, Protocol):
    """An event that knows when the stream passed it."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from here to ``end``, another one; both have been passed."""


class Stream(Protocol):
    """A queue of work that runs in order."""

    def wait_event(self, event: Event) -> None:
        """Let nothing queued from now on run before ``event``. The host does not block."""

    def record_event(self) -> Event:
        """A new event after everything queued so far."""


class Allocated(NamedTuple):
    """Bytes of device memory.

    Attributes:
        nbytes: That tensors have now.
        peak_bytes: The most that they had since somebody last reset it.
        reserved_bytes: What the allocator holds for them, if it tells.
        num_retries: How often it had to give memory back before it got more, if it tells.
    """

    nbytes: int
    peak_bytes: int
    reserved_bytes: int = 0
    num_retries: int = 0


@runtime_checkable
class Backend(Protocol):
    """One device: its live compute stream, two copy streams, and host memory for them.

    A class that extends this inherits defaults of what most devices do not need.
    """

    name: str
    """For messages: ``cpu``, ``simulated late``, ``cuda:0``."""

    device: torch.device
    """Where this backend's device tensors live; what a reload allocates on."""

    is_host: bool
    """Whether device tensors are ordinary host memory."""

    @property
    def is_capturing(self) -> bool:
        """Whether what is queued now becomes part of a graph instead of being run."""

    d2h: Stream
    """Device to host copies, in order."""

    h2d: Stream
    """Host to device copies, in order."""

    if TYPE_CHECKING:  # at run time a property would hide what an instance has

        @property
        def current_stream(self) -> Callable[[], Stream]:
            """The compute stream that is current now, on the calling thread. Never cache it."""

    def timed_event(self, stream: Stream) -> TimedEvent | None:
        """A new event after everything queued so far; None where the device has no clock."""
        return None

    def memory_bytes(self) -> int | None:
        """Bytes of device memory that tensors of this process may have; None if unknown."""
        return None

    def allocated(self) -> Allocated | None:
        """Device memory that tensors have; None if unknown. Takes tens of microseconds."""
        return None

    def open_disk(self, directory: str | os.PathLike[str] | None) -> Any:
        """A disk of the device's own, with the methods of a disk tier's file. None: a file is used,
        in ``directory`` if the user gave one.
        """
        return None

    def copy(
        self, stream: Stream, targets: list[Tensor], sources: list[Tensor], label: str
    ) -> None:
        """Queue ``targets[i].copy_(sources[i])`` for all ``i`` on ``stream``.

        The caller keeps targets and sources alive until an event recorded after this has finished.

        Args:
            stream: :attr:`d2h` or :attr:`h2d`.
            targets, sources: Of the same shapes and dtypes. No target overlaps another.
            label: The group these bytes belong to, for messages.
        """

    def allocate_host(self, nbytes: int) -> Tensor:
        """A flat ``uint8`` host tensor that :meth:`copy` can use asynchronously.

        Raises:
            MemoryError: The host cannot give ``nbytes``, or a graph is captured.
        """

    def trim_host(self) -> None:
        """Give host memory that was allocated here and freed back to the system."""
        return

    def joined(self) -> None:
        """Called when compute has just waited for both copy streams, as at the end of a capture."""
        return

    def activate(self) -> AbstractContextManager[object]:
        """A context to enter while this backend is in use; most backends need none."""
        return nullcontext()

    def synchronize(self) -> None:
        """Block the host until both copy streams are empty."""
        for stream in (self.d2h, self.h2d):
            stream.record_event().synchronize()


S = TypeVar("S", bound=Stream)


class HasLiveStream(Backend, Generic[S]):
    """A device unknown to PyTorch: the backend itself knows the current stream, of one thread."""

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
