"""Clocks of the host and of streams. Times are in seconds since the device was made.

Work receives its begin and end when it is launched, because all work it waits for was launched
before and has its times. So nothing ever runs, and there is no queue of future events.

    host = HostClock(hardware)
    compute, d2h = VirtualStream(host), VirtualStream(host)
    compute.launch(1e-3)                      # the host goes on after 5 us
    d2h.wait_event(compute.record_event())    # d2h begins a millisecond later
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from pp_offload.simulate.hardware import Hardware


class HostClock:
    """Clock of the host, which launches work without waiting. ``now_s`` is its time."""

    def __init__(self, hardware: Hardware) -> None:
        self.now_s = 0.0
        self.hardware = hardware

    def wait_until(self, time_s: float) -> None:
        """Block the host until ``time_s``."""
        self.now_s = max(self.now_s, time_s)


class VirtualEvent:
    """Point in a stream's order. ``time_s`` is the end of all work before the event, which may be
    before ``recorded_s``, when the host recorded it.
    """

    __slots__ = ("_host", "recorded_s", "time_s")

    def __init__(self, host: HostClock, time_s: float) -> None:
        self._host = host
        self.time_s = time_s
        self.recorded_s = host.now_s

    def query(self) -> bool:
        return self.time_s <= self._host.now_s

    def elapsed_time(self, end: VirtualEvent) -> float:
        return (end.time_s - self.time_s) * 1e3

    def synchronize(self) -> None:
        self._host.wait_until(self.time_s)


class VirtualStream:
    """Stream with a clock, which runs work in order.

    ``free_at_s`` is the end of all work launched so far; launched work waited ``stalled_s`` for
    other streams. Listeners are called for each work, with three times: when only other streams
    delayed it, when it begins, and when it ends.
    """

    def __init__(self, host: HostClock) -> None:
        self.free_at_s = self.busy_s = self.stalled_s = 0.0
        self.listeners: tuple[Callable[[float, float, float], None], ...] = ()
        self._host = host
        self._may_begin_s = 0.0
        self._queued_ends_s: deque[float] = deque()

    def launch(self, seconds: float) -> float:
        """Launch work that takes ``seconds``, and return its end."""
        return self.launch_until(lambda begin_s: begin_s + seconds)

    def launch_until(self, end_s: Callable[[float], float]) -> float:
        """Launch work whose end depends on its begin, and return its end.

        If the queue of launches is full, the host waits for room first.
        """
        host, queue = self._host, self._queued_ends_s
        host.now_s += host.hardware.launch_s
        while queue and queue[0] <= host.now_s:
            queue.popleft()
        if len(queue) >= host.hardware.num_queued_launches:
            host.wait_until(queue.popleft())
        ready_s = max(self.free_at_s, host.now_s)
        begin_s = max(ready_s, self._may_begin_s)
        self.stalled_s += begin_s - ready_s
        self.free_at_s = end_s(begin_s)
        self.busy_s += self.free_at_s - begin_s
        queue.append(self.free_at_s)
        for call in self.listeners:
            call(ready_s, begin_s, self.free_at_s)
        return self.free_at_s

    def wait_event(self, event: Any) -> None:
        """Delay all work launched from now on until ``event``."""
        self.wait_until(event.time_s)

    def wait_until(self, time_s: float) -> None:
        """Delay all work launched from now on until ``time_s``."""
        self._may_begin_s = max(self._may_begin_s, time_s)

    def wait_stream(self, other: VirtualStream) -> None:
        """Delay all work launched from now on until all work that ``other`` has now ended."""
        self.wait_until(other.ready_at_s)

    @property
    def ready_at_s(self) -> float:
        """End of all work launched so far, and of all that the stream waits for."""
        return max(self.free_at_s, self._may_begin_s)

    def record_event(self) -> VirtualEvent:
        """Record an event after all work launched so far."""
        return VirtualEvent(self._host, self.ready_at_s)

    def synchronize(self) -> None:
        """Have the host wait for all work of the stream."""
        self._host.wait_until(self.ready_at_s)
