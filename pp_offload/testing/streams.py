"""Streams of a simulated device, and the order in which their copies run.

A compute stream is the host itself: its work has run before any query. A copy stream has a
queue of copies and of events it waits for. The timeline decides when the head of a queue runs:
only when something waits for it (``late``), at once (``eager``), or at random (``random``).

    timeline = Timeline("late", seed=0)
    d2h = timeline.add_stream("d2h", is_copy=True)
    timeline.queue_copies(d2h, [QueuedCopy(...)])
    compute.wait_event(d2h.record_event())  # runs it

On a device a queued copy does not own its tensors, so a tensor freed too early must show: here a
queued copy keeps nothing alive, and a target holds garbage until its copy runs.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pp_offload._common.torch_private import no_dispatch
from pp_offload._common.workers import inside_torch, is_worker
from pp_offload.backends.base import CapturedEvent, Event
from pp_offload.errors import CaptureError, RaceError
from pp_offload.testing.happens_before import RaceDetector, StreamClock, VectorClock, extent_of

ORDERS = ("late", "eager", "random")


class SimulatedEvent:
    """Point in a simulated stream's queue, and the past of the stream at that point."""

    def __init__(self, stream: SimulatedStream, position: int, past: VectorClock) -> None:
        self.stream, self.position, self.past = stream, position, past
        self.capture = stream.capture

    def is_reached(self) -> bool:
        """Whether everything queued before this point has run; no side effects."""
        return self.stream.num_done >= self.position

    def query(self) -> bool:
        """Return whether the point is reached; if so, the host has waited for it. In the order
        ``late`` an event of a compute stream is seen only by synchronizing.
        """
        timeline = self.stream.timeline
        host = timeline.detector.host
        with timeline.lock:
            timeline.begin_question(self, "an event is queried")
            if timeline.order == "late" and not self.stream.is_copy and not host.covers(self.past):
                return False
            if self.is_reached():
                host.merge(self.past)
            return self.is_reached()

    def synchronize(self) -> None:
        """Run everything before this point, and have the host wait for it. If a thread of a tier
        waits, the host does not learn of it: the program has yet to ask. But memory that this
        thread frees then is no longer in use.
        """
        timeline = self.stream.timeline
        if is_worker():
            with inside_torch(), timeline.lock:
                timeline.force(self)
                timeline.detector.thread_clock().merge(self.past)
            return
        with timeline.lock:
            timeline.begin_question(self, "an event is synchronized")
            self.finish()

    def finish(self) -> None:
        """Run everything before this point, for the simulator's own use."""
        self.stream.timeline.force(self)
        self.stream.timeline.detector.host.merge(self.past)


class SimulatedStream(StreamClock):
    """A compute stream, which the host runs at once, or a copy stream, which has a queue."""

    def __init__(self, timeline: Timeline, name: str, *, is_copy: bool) -> None:
        super().__init__(name, is_copy=is_copy)
        self.timeline = timeline
        self.queue: deque[QueuedCopy | SimulatedEvent] = deque()
        self.num_done = 0
        self.capture = 0

    def wait_event(self, event: Event) -> None:
        """Order all later work of this stream after ``event``; compute makes its copies run."""
        if isinstance(event, CapturedEvent):
            return  # never recorded, as for PyTorch's own streams
        assert isinstance(event, SimulatedEvent)
        with self.timeline.lock:
            self.timeline.enter()
            if event.capture != self.capture:
                if self.capture or event.capture != self.timeline.capture:
                    raise CaptureError(
                        f"stream {self.name}, in {_capture(self.capture)}, waits for an event "
                        f"recorded in {_capture(event.capture)}; expected one of the same capture"
                    )
                self.capture = event.capture  # the stream joins that capture
            self.past.merge(event.past)
            if not self.is_copy:
                self.timeline.force(event)
            elif not event.is_reached():
                self.queue.append(event)
                if self.timeline.order == "eager":
                    self.timeline.force(self.last_event())

    def wait_stream(self, other: SimulatedStream) -> None:
        """Order all later work of this stream after all current work of ``other``."""
        self.wait_event(other.record_event())

    def record_event(self) -> SimulatedEvent:
        """Record an event after everything queued so far."""
        with self.timeline.lock:
            self.timeline.enter()
            return self.last_event()

    def last_event(self) -> SimulatedEvent:
        """Make an event after everything queued so far, for the simulator's own use."""
        past = VectorClock(self.past).merge(self.timeline.detector.host)
        return SimulatedEvent(self, self.num_done + len(self.queue), past)

    def synchronize(self) -> None:
        """Run everything queued, and have the host wait for it."""
        self.record_event().synchronize()

    def blocker(self) -> SimulatedEvent | None:
        """Return the event that the head of the queue waits for; None if it is reached."""
        head = self.queue[0]
        return head if isinstance(head, SimulatedEvent) and not head.is_reached() else None

    def run_head(self) -> None:
        """Run the first piece of work, which must not be blocked."""
        head = self.queue.popleft()
        self.num_done += 1
        if isinstance(head, QueuedCopy):
            head.run()


class Timeline:
    """Streams of one device, and the order, one of :data:`ORDERS`, in which their queued work runs.
    The lock is held while queues change: one thread computes, but tiers' threads wait for events.
    """

    def __init__(self, order: str, seed: int) -> None:
        if order not in ORDERS:
            raise ValueError(f"order is {order!r}; expected one of 'late', 'eager', 'random'")
        self.order = order
        self.detector = RaceDetector()
        self.streams: dict[str, SimulatedStream] = {}
        self.capture = 0
        self._random = random.Random(seed)
        self.lock = threading.RLock()

    def forbid_in_capture(self, what: str) -> None:
        """Raise :class:`CaptureError` if a graph is captured."""
        if self.capture:
            raise CaptureError(f"{what} in {_capture(self.capture)}; expected it before or after")

    def begin_question(self, event: SimulatedEvent, what: str) -> None:
        """Begin a call that asks whether ``event`` is reached. Raise a CaptureError if a graph is
        captured, or ``event`` was: it is not reached by capturing.
        """
        self.enter()
        self.forbid_in_capture(what)
        if event.capture:
            raise CaptureError(f"an event recorded in {_capture(event.capture)} is asked about")

    def add_stream(self, name: str, *, is_copy: bool) -> SimulatedStream:
        """Make a stream, unordered with others. Raise a ValueError if the name is taken."""
        if name in self.streams:
            raise ValueError(f"stream {name!r} exists; expected a new name")
        stream = SimulatedStream(self, name, is_copy=is_copy)
        self.streams[name] = stream
        return stream

    def enter(self) -> None:
        """Begin a call: raise a race that is due, and in ``random`` order run some queued work."""
        self.detector.raise_fault()
        if self.order == "random":
            with self.lock:
                while self._random.random() < 0.5:
                    ready = [s for s in self.streams.values() if s.queue and s.blocker() is None]
                    if not ready:
                        return
                    self._random.choice(ready).run_head()

    def queue_copies(self, stream: SimulatedStream, copies: Iterable[QueuedCopy]) -> None:
        """Queue ``copies``; spoil each target unless another queued copy still needs it."""
        with self.lock:
            for copy in copies:
                queued = [each for old in self.queued_copies() for each in (old.target, old.source)]
                if not any(copy.target.overlaps(each) for each in queued):
                    copy.spoil_target()
                stream.queue.append(copy)
            if self.order == "eager":
                self.force(stream.last_event())

    def force(self, event: SimulatedEvent) -> None:
        """Run all that must run before ``event``, and nothing else."""
        goals = [event]
        while goals:
            goal = goals[-1]
            if goal.is_reached():
                goals.pop()
            elif (blocker := goal.stream.blocker()) is not None:
                goals.append(blocker)
            else:
                goal.stream.run_head()

    def queued_copies(self) -> list[QueuedCopy]:
        """Return copies that have not run yet."""
        # A copy of each queue, because an engine collected here runs queued work.
        queues = (tuple(stream.queue) for stream in self.streams.values())
        return [work for queue in queues for work in queue if isinstance(work, QueuedCopy)]


def _capture(number: int) -> str:
    return f"capture {number}" if number else "no capture"


POISON = 0xFF
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def unwatched() -> Iterator[None]:
    """Hide the simulator's own operators from autograd and from dispatch modes."""
    with no_dispatch(), torch.no_grad():
        yield


class WeakTensor:
    """Place of a tensor, without keeping its storage alive."""

    def __init__(self, tensor: Tensor) -> None:
        self.extent = extent_of(tensor)
        self._storage = weakref.ref(tensor.untyped_storage())
        self._dtype = tensor.dtype
        self._geometry = (tensor.storage_offset(), tensor.size(), tensor.stride())

    def rebuild(self) -> Tensor | None:
        """Make a tensor on the same bytes; None if the storage is gone or was emptied."""
        storage = self._storage()
        if storage is None or storage.nbytes() < self.extent.stop:
            return None
        tensor = torch.empty(0, dtype=self._dtype, device=storage.device)
        return tensor.set_(storage, *self._geometry)

    def overlaps(self, other: WeakTensor) -> bool:
        """Whether both tensors lie on the same storage and share a byte."""
        storage = self._storage()
        is_same = storage is not None and storage is other._storage()
        return is_same and self.extent.overlaps(other.extent)


class QueuedCopy:
    """Call of ``target.copy_(source)`` that has not run yet, for the group ``label``."""

    def __init__(self, target: Tensor, source: Tensor, label: str) -> None:
        self.target, self.source, self.label = WeakTensor(target), WeakTensor(source), label

    @unwatched()
    def spoil_target(self) -> None:
        """Set every byte of every element of the target to 0xFF, which is NaN for floats."""
        target = self.target.rebuild()
        if target is None or target.numel() == 0:
            return
        target = torch.view_as_real(target) if target.is_complex() else target
        target.view(_INTEGERS[target.itemsize]).fill_(-1)

    @unwatched()
    def run(self) -> None:
        """Run the copy. Raise a RaceError if source or target was freed meanwhile."""
        target, source = self.target.rebuild(), self.source.rebuild()
        if target is None or source is None:
            side = "target" if target is None else "source"
            raise RaceError(
                f"the {side} of group {self.label!r} was freed before the copy ran; "
                "keep it alive until an event recorded after the copy has finished"
            )
        target.copy_(source)
