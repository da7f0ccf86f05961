"""A device made of CPU tensors, on which a forgotten wait is always an error.

Compute runs on the host in program order; copies wait in queues and run as late as the program
permits (``late``), at once (``eager``), or in some legal order drawn from a seed (``random``).
Targets hold garbage until their copy has run, queued copies keep nothing alive, and every access
is checked by :mod:`pp_offload.backends.happens_before`, so that luck does not count.

    backend = SimulatedBackend("late")
    with backend.activate():
        ...  # forward and backward; raises RaceError at the first unordered access
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pp_offload.backends.base import Event, Stream
from pp_offload.backends.happens_before import RaceDetector, StreamClock, VectorClock
from pp_offload.backends.simulated_copies import POISON, QueuedCopy, WeakTensor, unwatched

ORDERS = ("late", "eager", "random")
_METADATA_ONLY = ("empty", "new_empty", "zeros_like", "ones_like", "full_like", "new_zeros")


class SimulatedEvent:
    """A point in a simulated stream's queue, and what that stream knew there."""

    def __init__(self, stream: SimulatedStream, position: int, known: VectorClock) -> None:
        self.stream = stream
        self.position = position
        self.known = known

    def is_reached(self) -> bool:
        """Whether everything queued before this point has run; no side effects."""
        return self.stream.num_done >= self.position

    def query(self) -> bool:
        """Whether it is reached; if so, the host knows from now on.

        In the order ``late`` an event of a compute stream is seen only by synchronizing.
        """
        backend = self.stream.backend
        backend.enter()
        host = backend.detector.host
        if backend.order == "late" and not self.stream.is_copy and not host.covers(self.known):
            return False
        if self.is_reached():
            host.merge(self.known)
            return True
        return False

    def synchronize(self) -> None:
        """Run everything before this point; the host knows from now on."""
        backend = self.stream.backend
        backend.enter()
        backend.force(self)
        backend.detector.host.merge(self.known)


class SimulatedStream:
    """A compute stream, which the host runs at once, or a copy stream, which has a queue."""

    def __init__(self, backend: SimulatedBackend, name: str, *, is_copy: bool) -> None:
        self.backend = backend
        self.name = name
        self.is_copy = is_copy
        self.clock = StreamClock(name, is_copy=is_copy)
        self.queue: deque[QueuedCopy | SimulatedEvent] = deque()
        self.num_done = 0

    def wait_event(self, event: Event) -> None:
        """Order all later work of this stream after ``event``; compute makes its copies run."""
        assert isinstance(event, SimulatedEvent)
        self.backend.enter()
        self.clock.known.merge(event.known)
        if not self.is_copy:
            self.backend.force(event)
        elif not event.is_reached():
            self.queue.append(event)
            self.backend.work_queued(self)

    def wait_stream(self, other: SimulatedStream) -> None:
        """Order all later work of this stream after all that ``other`` has now."""
        self.wait_event(other.record_event())

    def record_event(self) -> SimulatedEvent:
        """A new event after everything queued so far."""
        self.backend.enter()
        return self.last_event()

    def last_event(self) -> SimulatedEvent:
        """The same, for the backend's own use."""
        known = self.clock.known.merged(self.backend.detector.host)
        return SimulatedEvent(self, self.num_done + len(self.queue), known)

    def synchronize(self) -> None:
        """Run everything queued; the host knows from now on."""
        self.record_event().synchronize()

    def blocker(self) -> SimulatedEvent | None:
        """What the head of the queue waits for, if it is not reached."""
        head = self.queue[0]
        return head if isinstance(head, SimulatedEvent) and not head.is_reached() else None

    def run_head(self) -> None:
        """Run the first piece of work; it must not be blocked."""
        head = self.queue.popleft()
        self.num_done += 1
        if isinstance(head, QueuedCopy):
            head.run()


class SimulatedBackend:
    """CPU tensors as device tensors, copies out of order, races as errors.

    Args:
        order: When queued copies run: ``late``, ``eager`` or ``random``.
        seed: Which legal order ``random`` takes; the same seed, the same order.

    Raises:
        ValueError: ``order`` is none of the three.
    """

    def __init__(self, order: str = "late", seed: int = 0) -> None:
        if order not in ORDERS:
            raise ValueError(f"order is {order!r}; expected one of 'late', 'eager', 'random'")
        self.order = order
        self.name = f"simulated {order}"
        self.device = torch.device("cpu")
        self.detector = RaceDetector()
        self.num_host_allocations = 0
        self._random = random.Random(seed)
        self._streams: dict[str, SimulatedStream] = {}
        self._copy_streams = tuple(self._add_stream(n, is_copy=True) for n in ("d2h", "h2d"))
        self._current = self._add_stream("compute", is_copy=False)
        self.d2h: Stream = self._copy_streams[0]
        self.h2d: Stream = self._copy_streams[1]

    @property
    def pending(self) -> int:
        """How many copies have not run yet."""
        return sum(1 for _ in self._queued_copies())

    def current_stream(self) -> SimulatedStream:
        """The live compute stream."""
        return self._current

    def new_stream(self, name: str) -> SimulatedStream:
        """Another compute stream, ordered with nothing.

        Raises:
            ValueError: The name is taken.
        """
        if name in self._streams:
            raise ValueError(f"stream {name!r} exists; expected a new name")
        return self._add_stream(name, is_copy=False)

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[SimulatedStream]:
        """Make ``stream`` the live compute stream inside."""
        previous, self._current = self._current, stream
        try:
            yield stream
        finally:
            self._current = previous

    def copy(
        self, stream: Stream, targets: list[Tensor], sources: list[Tensor], label: str
    ) -> None:
        """Check and queue the copies.

        Raises:
            RaceError: Nothing orders them after an earlier conflicting access.
        """
        assert isinstance(stream, SimulatedStream) and stream.is_copy
        self.enter()
        stream.clock.advance(self.detector.host)
        pairs = list(zip(targets, sources, strict=True))
        for target, source in pairs:
            self._check_copy(stream, source, "read", label, is_host=stream is self.h2d)
            self._check_copy(stream, target, "write", label, is_host=stream is self.d2h)
        for target, source in pairs:
            self._queue(stream, QueuedCopy(WeakTensor(target), WeakTensor(source), label))
        self.work_queued(stream)

    def allocate_host(self, nbytes: int) -> Tensor:
        """Garbage bytes."""
        self.enter()
        self.num_host_allocations += 1
        with self._inside():
            buffer = torch.empty(nbytes, dtype=torch.uint8).fill_(POISON)
        self.detector.see(buffer, self._current.clock, is_host=True)
        return buffer

    def activate(self) -> AbstractContextManager[object]:
        """Watch every compute operation; :meth:`check` at the end."""
        return _Watch(self)

    def check(self) -> None:
        """Raise the race that the release of a tensor caused, if there was one."""
        self.detector.raise_fault()

    def synchronize(self) -> None:
        """Run all copies; the host knows of everything from now on."""
        self.enter()
        for stream in self._streams.values():
            event = stream.last_event()
            self.force(event)
            self.detector.host.merge(event.known)

    def enter(self) -> None:
        """Every call begins here: raise what is due, and in ``random`` run what chance says."""
        self.detector.raise_fault()
        if self.order != "random":
            return
        while self._random.random() < 0.5:
            ready = [s for s in self._copy_streams if s.queue and s.blocker() is None]
            if not ready:
                return
            self._random.choice(ready).run_head()

    def work_queued(self, stream: SimulatedStream) -> None:
        """Called when ``stream`` has new work."""
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

    def before_operator(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check what a compute operator reads and writes on the live stream."""
        self.enter()
        clock = self._current.clock
        clock.advance(self.detector.host)
        for tensor, is_write in _operands(func, args, kwargs):
            if _has_bytes(tensor):
                self.detector.see(tensor, clock, is_host=False)
                self.detector.access(clock, tensor, "write" if is_write else "read", str(func))

    def after_operator(self, outputs: Any) -> None:
        """Know which stream made which storage."""
        for tensor in _tensors_in(outputs):
            if _has_bytes(tensor):
                self.detector.see(tensor, self._current.clock, is_host=False)

    def _add_stream(self, name: str, *, is_copy: bool) -> SimulatedStream:
        stream = SimulatedStream(self, name, is_copy=is_copy)
        self._streams[name] = stream
        return stream

    def _inside(self) -> AbstractContextManager[None]:
        """Operators that :meth:`activate` must not see."""
        return unwatched()

    def _check_copy(
        self, stream: SimulatedStream, tensor: Tensor, kind: str, label: str, *, is_host: bool
    ) -> None:
        self.detector.see(tensor, self._current.clock, is_host=is_host)
        self.detector.access(stream.clock, tensor, kind, label)

    def _queue(self, stream: SimulatedStream, copy: QueuedCopy) -> None:
        """Queue ``copy``, and spoil its target unless another queued copy still needs it."""
        if not any(queued.touches(copy.target) for queued in self._queued_copies()):
            copy.spoil_target()
        stream.queue.append(copy)

    def _queued_copies(self) -> Iterator[QueuedCopy]:
        for stream in self._copy_streams:
            yield from (work for work in stream.queue if isinstance(work, QueuedCopy))


class _Watch(TorchDispatchMode):
    """Shows the backend every compute operator, before and after it runs."""

    def __init__(self, backend: SimulatedBackend) -> None:
        super().__init__()
        self._backend = backend

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_view(func):
            return func(*args, **kwargs)
        self._backend.before_operator(func, args, kwargs)
        outputs = func(*args, **kwargs)
        self._backend.after_operator(outputs)
        return outputs

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if kind is None:
            self._backend.check()


@cache
def _is_view(func: Any) -> bool:
    """Whether an operator only makes another view: it returns an alias it does not write."""
    aliases = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


@cache
def _parameters(func: Any) -> tuple[tuple[str, bool], ...]:
    """Name of each parameter of an operator, and whether it is written."""
    arguments = func._schema.arguments
    return tuple((a.name, a.alias_info is not None and a.alias_info.is_write) for a in arguments)


def _operands(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Tensor, bool]]:
    """Tensors whose bytes an operator touches, and whether it writes them."""
    if func._schema.name.split("::")[-1].startswith(_METADATA_ONLY):
        return
    for index, (name, is_write) in enumerate(_parameters(func)):
        value = args[index] if index < len(args) else kwargs.get(name)
        for tensor in _tensors_in(value):
            yield tensor, is_write


def _tensors_in(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return (item for item in value if isinstance(item, Tensor))
    return ()


def _has_bytes(tensor: Tensor) -> bool:
    """Whether it is an ordinary CPU tensor; sparse, meta and fake ones are not."""
    if tensor.layout is not torch.strided:
        return False
    try:
        return tensor.untyped_storage().device.type == "cpu"
    except (NotImplementedError, RuntimeError):
        return False


__all__ = ["ORDERS", "SimulatedBackend", "SimulatedEvent", "SimulatedStream"]
