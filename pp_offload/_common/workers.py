"""Threads that do what is queued, in turn.

They are daemons: what nobody waits for does not keep a process from ending. They start when first
needed, end with their queue, and a forked process, which has none of them, starts its own.

    workers = Workers("disk", num_threads=4)
    piece = workers.submit(work)
    piece.result()                  # what work gave, or raises what it raised

NOTE [ Signals and threads ]
    A signal handler may raise between any two lines of the main thread, also in those of
    ``threading.Event`` and ``Condition``, which then keep their lock for ever. So each waiter has a
    lock of its own, which is C, and which nobody else needs. And an interrupt may leave a thread
    started that nobody knows of. So a thread serves only if it finds a seat, and there are as many
    seats as threads were asked for: with one seat, work is done in order, however many threads
    there are.

NOTE [ Threads inside torch ]
    Where torch copies or frees a tensor it gives up the interpreter's lock. Python ends a daemon
    that takes this lock again while the process ends, and C++ then aborts the process. So threads
    enter torch through :func:`inside_torch`, and the exit waits until all have come out, and closes
    the doors. A thread may go through its own again: a finalizer that garbage collection runs there
    may call torch, too. Elsewhere a thread may be ended anywhere: one that is stuck, as on a disk,
    holds up no exit.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from _thread import LockType, allocate_lock
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import Empty, SimpleQueue
from typing import Any

from pp_offload._common.processes import check, current
from pp_offload.errors import ClosedError

_here = threading.local()

_doors: list[threading.RLock] = []  # type: ignore[valid-type]
"""One for each thread that serves, held inside torch. See NOTE [ Threads inside torch ]."""

_closed: list[None] = []
"""Not empty when the process ends."""

_nothing = nullcontext()


def inside_torch() -> AbstractContextManager[object]:
    """To be entered by a thread's work around what calls torch, or lets go of tensors."""
    return getattr(_here, "door", _nothing)


@atexit.register
def _close_doors() -> None:
    _closed.append(None)
    for door in _doors.copy():
        door.acquire()


os.register_at_fork(after_in_child=_doors.clear)  # the threads do not follow


def is_worker() -> bool:
    """Whether this is a thread of some :class:`Workers`."""
    return hasattr(_here, "is_worker")


class Piece:
    """Work for a thread, and the point where it has ended."""

    __slots__ = ("__weakref__", "_has_ended", "_owner", "_value", "_waiters", "_work", "failure")

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = [work]  # taken out by whoever does it or calls it off: one pop is atomic
        self._has_ended = False
        self._waiters: list[LockType] = []  # see NOTE [ Signals and threads ]
        self._owner = current()
        self._value: Any = None
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Do it, unless it was called off. What it refers to is let go of before it has ended."""
        try:
            work = self._work.pop()
        except IndexError:
            return
        try:
            self._value = work()
        except BaseException as failure:
            self.failure = failure
        with inside_torch():
            del work
        self._end()

    def call_off(self) -> bool:
        """End it without doing it. If it had begun, it goes on, and this returns False."""
        try:
            self._work.pop()
        except IndexError:
            return False
        self._end()
        return True

    def _end(self) -> None:
        self._has_ended = True  # before the waiters are looked at: a later one sees it
        for waiter in self._waiters:
            waiter.release()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._has_ended

    def wait(self) -> None:
        """Block until it has ended.

        Raises:
            ForkedError: It was queued before this process was forked, whose threads do not follow.
            ClosedError: The process ends.
        """
        if self._has_ended or sys.is_finalizing():  # then no thread runs any more
            return
        check(self._owner, "work that was queued")
        _check_not_closed()
        mine = allocate_lock()
        mine.acquire()
        self._waiters.append(mine)
        if not self._has_ended:  # else the lock may have been overlooked
            mine.acquire()  # released at the end

    def result(self) -> Any:
        """What it gave, once it has ended; raises what it raised."""
        self.wait()
        if self.failure is not None:
            raise self.failure
        return self._value


def _check_not_closed() -> None:
    if _closed:
        raise ClosedError("the process ends, and no thread copies any more; do this before its end")


Work = SimpleQueue[Any]
"""Pieces, and in the end a dead reference."""


class Workers:
    """A queue of work, and the threads that do it.

    Args:
        name: Of the threads.
        num_threads: How many pieces may be under way at once. They begin in the order they came.
        keep: What the threads refer to until they end.
    """

    def __init__(self, name: str, num_threads: int = 1, keep: object = None) -> None:
        self._name = name
        self._num_threads = num_threads
        self._keep = keep
        self._begin()

    def _begin(self) -> None:
        queue: Work = SimpleQueue()
        self._seats: SimpleQueue[None] = SimpleQueue()
        for _ in range(self._num_threads):
            self._seats.put(None)
        self._serving: list[None] = []
        self._served: SimpleQueue[None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        # The callback is a C function, so nothing runs in Python where the last reference goes.
        self._end = weakref.ref(self, queue.put)
        self._queue = queue
        self._owner = current()

    def submit(self, work: Callable[[], object]) -> Piece:
        """Queue ``work``."""
        piece = self.piece(work)
        try:
            self.queue(piece)
        except BaseException:
            piece.call_off()
            raise
        return piece

    def piece(self, work: Callable[[], object]) -> Piece:
        """Work that is not queued yet."""
        return Piece(work)

    def queue(self, piece: Piece) -> None:
        """Have a thread do it. A caller that is interrupted in here has to call it off."""
        _check_not_closed()
        if self._owner != current():
            self._begin()
        if len(self._serving) < self._num_threads:
            self._start_one()
        if self._threads or self._serving:
            self._queue.put(piece)
        else:
            piece.run()

    def shutdown(self) -> None:
        """Finish what is queued, and end the threads.

        They are not joined: one whose start was cut off may never come to its end.
        """
        self._queue.put(self._end)
        if self._owner == current():
            while self._serving:
                self._served.get()
                self._serving.pop()

    def _start_one(self) -> None:
        thread = threading.Thread(
            target=_serve,
            args=(self._seats, self._serving, self._served, self._queue, self._end, self._keep),
            name=f"pp_offload-{self._name}",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError:  # no more threads, as late in the end of a process: do it here
            return
        self._threads.append(thread)


def _serve(
    seats: SimpleQueue[None],
    serving: list[None],
    served: SimpleQueue[None],
    queue: Work,
    end: object,
    keep: object,
) -> None:
    try:
        serving.append(seats.get_nowait())
    except Empty:
        return  # see NOTE [ Signals and threads ]
    _here.is_worker = True
    _here.door = door = threading.RLock()
    _doors.append(door)
    while (piece := queue.get()) is not end:
        piece.run()
        with door:
            del piece  # or it would be kept until the next
    _doors.remove(door)
    queue.put(end)  # for the next thread
    served.put(None)
