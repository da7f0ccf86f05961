"""Threads that do queued work in order.

    workers = Workers("disk", num_threads=4)
    piece = workers.submit(work)
    piece.result()                  # returns what work returned, or raises what it raised

The threads are daemons, so a process may end while they work. They start when first needed and end
with their queue. A forked process inherits no threads and starts its own.

NOTE [ Signals and threads ]
    A signal handler may raise between any two lines of the main thread, also inside
    ``threading.Event`` and ``Condition``, which then keep their lock forever. So each waiter has a
    lock of its own, which is written in C. Threads whose start was interrupted keep an empty queue,
    and the next call starts others.

NOTE [ Threads inside torch ]
    Torch gives up the interpreter's lock where it copies or frees a tensor. Python ends a daemon
    that takes this lock again while the process ends, and C++ then aborts the process. So threads
    enter torch through :func:`inside_torch`, and the exit waits until all have left, and locks
    these doors. A door is reentrant, because a finalizer of the same thread may call torch, too.
    Elsewhere a thread may be ended anywhere: a thread stuck on a disk delays no exit.
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
from queue import SimpleQueue
from typing import Any

from pp_offload._common.processes import HERE, check
from pp_offload.errors import ClosedError

_here = threading.local()
# A lock for each thread that serves, held inside torch. See NOTE [ Threads inside torch ].
_doors: list[threading.RLock] = []  # type: ignore[valid-type]
_closed: list[None] = []  # not empty when the process ends
_nothing = nullcontext()


def inside_torch() -> AbstractContextManager[object]:
    """Return a context for work of a thread that calls torch or releases tensors."""
    return getattr(_here, "door", _nothing)


@atexit.register
def _close_doors() -> None:
    _closed.append(None)
    for door in _doors.copy():
        door.acquire()


os.register_at_fork(after_in_child=_doors.clear)  # the threads do not follow


def is_worker() -> bool:
    """Whether the current thread belongs to :class:`Workers`."""
    return hasattr(_here, "door")


class Piece:
    """A piece of work for a thread; other threads may wait for its end."""

    __slots__ = ("__weakref__", "_has_ended", "_owner", "_value", "_waiters", "_work", "failure")

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = [work]  # popped by run() or call_off(): a pop is atomic
        self._has_ended = False
        self._waiters: list[LockType] = []  # see NOTE [ Signals and threads ]
        self._owner = HERE[0]
        self._value: Any = None
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Do the work, unless it was called off, and release it before the piece has ended."""
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
        """End the piece without doing the work; return False if the work has begun."""
        try:
            self._work.pop()
        except IndexError:
            return False
        self._end()
        return True

    def _end(self) -> None:
        self._has_ended = True  # before the loop: a later waiter sees the flag
        for waiter in self._waiters:
            waiter.release()

    def done(self) -> bool:
        """Whether the work has ended, successfully or not."""
        return self._has_ended

    def wait(self) -> None:
        """Block until the work has ended; raise a ForkedError if it was queued in another process,
        before a fork, and a ClosedError if this process ends.
        """
        if self._has_ended or sys.is_finalizing():  # then no thread runs any more
            return
        check(self._owner, "work that was queued")
        _check_not_closed()
        lock = allocate_lock()
        lock.acquire()
        self._waiters.append(lock)
        if not self._has_ended:  # else _end() may have missed this lock
            lock.acquire()  # released by _end()

    def result(self) -> Any:
        """Wait, and return what the work returned, or raise what it raised."""
        self.wait()
        if self.failure is not None:
            raise self.failure
        return self._value


def _check_not_closed() -> None:
    if _closed:
        raise ClosedError("the process ends, and no thread copies any more; do this before its end")


class Workers:
    """A queue of work, and threads that begin its pieces in order, ``num_threads`` at a time. The
    threads refer to ``keep`` until they end.
    """

    def __init__(self, name: str, num_threads: int = 1, keep: object = None) -> None:
        self._name, self._num_threads, self._keep = name, num_threads, keep
        self._owner: int | None = None  # process that has the threads
        self._threads: list[threading.Thread] = []

    def _begin(self) -> None:
        self._threads = []
        self._queue: SimpleQueue[Any] = SimpleQueue()  # of pieces, and in the end of self._end
        # The callback is C, so no Python code runs where the last reference is dropped.
        self._end = weakref.ref(self, self._queue.put)
        name, args = f"pp_offload-{self._name}", (self._queue, self._end, self._keep)
        for _ in range(self._num_threads):
            thread = threading.Thread(target=_serve, args=args, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        self._owner = HERE[0]  # last: see NOTE [ Signals and threads ]

    def submit(self, work: Callable[[], object]) -> Piece:
        """Queue work, and return its piece."""
        piece = Piece(work)
        try:
            self.queue(piece)
        except BaseException:
            piece.call_off()
            raise
        return piece

    def queue(self, piece: Piece) -> None:
        """Queue a piece. A caller interrupted inside must call the piece off."""
        _check_not_closed()
        if self._owner != HERE[0]:
            self._begin()
        self._queue.put(piece)

    def shutdown(self) -> None:
        """Finish the queued work, and end the threads; a call after an interrupted one goes on."""
        self._owner = None  # first: work queued behind the end would never be done
        if self._threads:
            self._queue.put(self._end)
        for thread in self._threads:
            thread.join()


def _serve(queue: SimpleQueue[Any], end: object, keep: object) -> None:
    _here.door = door = threading.RLock()
    _doors.append(door)
    if _closed:  # the exit may not have seen this door
        return
    while (piece := queue.get()) is not end:
        piece.run()
        with door:
            del piece  # otherwise it would live until the next piece
    _doors.remove(door)
    queue.put(end)  # for the next thread
