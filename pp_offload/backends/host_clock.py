"""Events timed by the host, for devices without a clock: the CPU above all.

    begin = timed_by_host(stream)
    ...
    begin.elapsed_time(timed_by_host(stream))

A thread that works off a queue notes when it has done something. Compute is the calling thread,
which is there already. Of any other stream it is known only when the host gave it its work.
"""

from __future__ import annotations

import time

from pp_offload.backends.base import Event, Stream
from pp_offload.backends.cpu import FINISHED, CopyStream, ThreadEvent


class HostTimedEvent:
    """A point in a stream's order, and when it was passed.

    Args:
        behind: What it comes with; one that is over has its time now.
    """

    __slots__ = ("_behind", "_now_s")

    def __init__(self, behind: Event = FINISHED) -> None:
        self._behind = behind
        self._now_s = None if isinstance(behind, ThreadEvent) else time.perf_counter()

    @property
    def time_s(self) -> float | None:
        """On the clock of ``time.perf_counter``; None before, and behind work that failed."""
        return self._behind.ended_s if isinstance(self._behind, ThreadEvent) else self._now_s

    def query(self) -> bool:
        """Whether it was passed."""
        return self._behind.query()

    def synchronize(self) -> None:
        """Block until it was passed; re-raise what failed before it."""
        self._behind.synchronize()

    def elapsed_time(self, end: HostTimedEvent) -> float:
        """Milliseconds from here to ``end``.

        Raises:
            RuntimeError: One of the two was never passed.
        """
        begin_s, end_s = self.time_s, end.time_s
        if begin_s is None or end_s is None:
            raise RuntimeError("an event has no time, for what was before it has not ended well")
        return (end_s - begin_s) * 1e3


def timed_by_host(stream: Stream) -> HostTimedEvent:
    """An event behind all that ``stream`` was given, timed by the host."""
    if not isinstance(stream, CopyStream):
        return HostTimedEvent()
    stream.is_timed = True
    return HostTimedEvent(stream.record_event())
