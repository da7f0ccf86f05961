"""The CPU as a device whose copies are really asynchronous.

Each copy stream is a worker thread with a queue, so a large copy runs beside compute as on an
accelerator. Small copies run at once in the calling thread when nothing is queued before them: a
hand-off between threads costs more than they do. Compute is the calling thread itself, so its work
is finished before any query, and a wait of compute blocks the thread.

torch's own CPU stream is a no-op, on which every program looks ordered; it is not used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import attrgetter

import torch
from torch import Tensor

from pp_offload._common.checks import check_count
from pp_offload._common.processes import HERE
from pp_offload._common.torch_private import foreach_copy_
from pp_offload._common.workers import Piece, Workers, inside_torch
from pp_offload.backends.base import Backend, Event, Stream, TimedEvent

INLINE_BYTES = 256 * 1024  # batches of up to so many are copied by the calling thread


@dataclass(eq=False)
class HostTimed:
    """A point that the calling thread has passed, or a point in the queue of a worker thread."""

    piece: Piece | None = None  # work of the thread, which then passes the point; None: passed
    time_s: float | None = None  # by perf_counter; None before, behind failed work, or unasked

    def query(self) -> bool:
        """Whether this point was passed, and no work failed before it."""
        return self.piece is None or (self.piece.done() and self.piece.failure is None)

    def synchronize(self) -> None:
        """Block until this point was passed; re-raise a failure before it."""
        if self.piece is not None:
            self.piece.result()

    def elapsed_time(self, end: HostTimed) -> float:
        """Return milliseconds to ``end``; raise a RuntimeError if either was never passed."""
        if self.time_s is None or end.time_s is None:
            raise RuntimeError("an event has no time, for what was before it has not ended well")
        return (end.time_s - self.time_s) * 1e3


FINISHED = HostTimed()


class ComputeStream:
    """The calling thread, seen as a stream: always finished, and waiting blocks it."""

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def record_event(self) -> Event:
        return FINISHED


COMPUTE = ComputeStream()


class CopyStream:
    """A queue served by one daemon thread, started when first needed. A forked process begins with
    an empty one: copies under way do not follow.
    """

    def __init__(self, name: str) -> None:
        self._workers = Workers(name)
        self._begin()

    def _begin(self) -> None:
        self._last = FINISHED
        self._failure: BaseException | None = None
        self._lock = threading.RLock()
        self._owner = HERE[0]

    def submit(self, work: Callable[[], object]) -> None:
        """Queue ``work`` after all that is queued."""
        if self._owner != HERE[0]:
            self._begin()
        event = HostTimed()
        event.piece = piece = Piece(partial(self._run, work, event))
        # Engines that share a backend have a lock each. With another piece in between, the last
        # event would be of one that is done before this.
        with self._lock:
            before = self._last
            try:
                self._last = event
                self._workers.queue(piece)
            except BaseException:
                if piece.call_off():  # else a wait for the event would never end
                    self._last = before
                raise

    def _run(self, work: Callable[[], object], event: HostTimed) -> None:
        """Do work in the thread. After a failure, all later work fails and is not done."""
        if self._failure is not None:
            raise self._failure
        try:
            work()
            event.time_s = time.perf_counter()
        except BaseException as failure:
            self._failure = failure
            raise

    def wait_event(self, event: Event) -> None:
        """Queue a wait, unless ``event`` has passed or belongs to this very queue."""
        if not event.query() and event is not self._last:
            self.submit(event.synchronize)

    def record_event(self) -> HostTimed:
        """Return the event of the last work, for work ends in order; FINISHED if it has ended."""
        if self._owner != HERE[0]:
            self._begin()
        return FINISHED if self._last.query() and self._failure is None else self._last


def timed_by_host(stream: Stream) -> TimedEvent:
    """Return an event behind all work of ``stream``, timed by the host: when the thread that serves
    the stream passes it, or now.
    """
    event = stream.record_event() if isinstance(stream, CopyStream) else FINISHED
    return HostTimed(time_s=time.perf_counter()) if event is FINISHED else event


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    with inside_torch():
        foreach_copy_(targets, sources)


class CpuBackend(Backend):
    """The CPU as a device, with a worker thread for each direction of copies.

    Args:
        inline_bytes: Batches up to this size are copied by the calling thread.
    """

    def __init__(self, *, inline_bytes: int = INLINE_BYTES) -> None:
        self.name, self.device, self.is_host = "cpu", torch.device("cpu"), True
        self.d2h: Stream = CopyStream("d2h")
        self.h2d: Stream = CopyStream("h2d")
        check_count("inline_bytes", inline_bytes)
        self._inline_bytes = inline_bytes

    is_capturing = False
    """A CPU has no graphs."""

    # The calling thread. A function in C, for it is called for each saved tensor.
    current_stream: Callable[[], Stream] = staticmethod(repeat(COMPUTE).__next__)

    def copy(
        self, stream: Stream, targets: list[Tensor], sources: list[Tensor], label: str
    ) -> None:
        """Copy on the calling thread if small and nothing is queued, else on the stream's."""
        assert isinstance(stream, CopyStream)
        nbytes = sum(map(attrgetter("nbytes"), targets))
        if nbytes <= self._inline_bytes and stream.record_event() is FINISHED:
            foreach_copy_(targets, sources)
        else:
            stream.submit(partial(_copy, list(targets), list(sources)))

    def allocate_host(self, nbytes: int) -> Tensor:
        """Return ordinary memory: the device is the host."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
