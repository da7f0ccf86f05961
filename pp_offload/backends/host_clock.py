"""Events timed by the host, for devices without a clock: the CPU above all.

    begin = timed_by_host(stream)
    ...
    begin.elapsed_time(timed_by_host(stream))

A thread that works off a queue notes the time when it comes by. Compute is the calling thread,
which is there already. Of any other stream it is known only when the host gave it its work.
"""

from __future__ import annotations

import time

from pp_offload.backends.base import Event, Stream
from pp_offload.backends.cpu import FINISHED, CopyStream


class HostTimedEvent:
    """A point in a stream's order, and when the host saw it passed.

    Attributes:
        time_s: On the clock of ``time.perf_counter``; None before, and behind work that failed.
    """

    __slots__ = ("_behind", "time_s")

    def __init__(self) -> None:
        self.time_s: float | None = None
        self._behind: Event = FINISHED

    def pass_by(self) -> None:
        """It is now."""
        self.time_s = time.perf_counter()

    def follow(self, event: Event) -> None:
        """It is passed when ``event`` is."""
        self._behind = event

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
        if self.time_s is None or end.time_s is None:
            raise RuntimeError("an event has no time, for what was before it has not ended well")
        return (end.time_s - self.time_s) * 1e3


def timed_by_host(stream: Stream) -> HostTimedEvent:
    """An event behind all that ``stream`` was given, timed by the host."""
    event = HostTimedEvent()
    if isinstance(stream, CopyStream) and not stream.is_idle():
        stream.submit(event.pass_by)
        event.follow(stream.record_event())
    else:
        event.pass_by()
    return event
