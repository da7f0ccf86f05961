"""Clocks of the host, of streams and of the link. Times are in seconds since the device was made.

Work receives its begin and end when it is launched, because all work it waits for was launched
before and has its times. So nothing ever runs, and there is no queue of future events.

    host = HostClock(hardware)
    compute, d2h = VirtualStream(host), VirtualStream(host)
    compute.launch(1e-3)                      # the host goes on after 5 us
    d2h.wait_event(compute.record_event())    # d2h begins a millisecond later
    d2h.launch_until(lambda begin_s: Link(host).copy(begin_s, nbytes, to_host=True))

NOTE [ First come, first served ]
    A copy receives its end when it is launched, so its rate is never reduced later. A copy
    launched later receives the rest: of the rate of its direction, and of the rate of both. So the
    link never exceeds its rate, and never idles while asked: bytes over time are exact, and so is
    the end of copies one after the other. Only which of two copies waits is approximated: on a
    device both would run at half the rate, here the first runs at the whole.

NOTE [ Slower compute ]
    An operator is slowed down by the copies launched before it. That is exact for copies that wait
    for all compute launched before them, as the engine's do. A copy without this wait slows down
    no operator launched before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

from pp_offload.simulate.hardware import Hardware

ROUNDING = 1e-9  # part of a fully used rate that rounding leaves over


class HostClock:
    """Clock of the host, which launches work without waiting. ``now_s`` is its time."""

    def __init__(self, hardware: Hardware) -> None:
        self.now_s, self.hardware = 0.0, hardware

    def wait_until(self, time_s: float) -> None:
        self.now_s = max(self.now_s, time_s)


class VirtualEvent:
    """Point in a stream's order. ``time_s`` is the end of all work before the event, which may be
    before ``recorded_s``, when the host recorded it.
    """

    __slots__ = ("_host", "recorded_s", "time_s")

    def __init__(self, host: HostClock, time_s: float) -> None:
        self._host, self.time_s, self.recorded_s = host, time_s, host.now_s

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
        self._host, self._may_begin_s = host, 0.0
        self._queued_ends_s: deque[float] = deque()

    def launch(self, seconds: float) -> float:
        """Launch work that takes ``seconds``, and return its end."""
        return self.launch_until(lambda begin_s: begin_s + seconds)

    def launch_until(self, end_s: Callable[[float], float]) -> float:
        """Launch work whose end depends on its begin, once the queue has room; return its end."""
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
        return VirtualEvent(self._host, self.ready_at_s)

    def synchronize(self) -> None:
        self._host.wait_until(self.ready_at_s)


class Use(NamedTuple):
    """Part of the rate that a copy has for some time."""

    begin_s: float
    end_s: float
    bytes_per_s: float
    to_host: bool


class Link:
    """Link that computes ends of copies, and counts their bytes in each direction."""

    def __init__(self, host: HostClock) -> None:
        self.bytes_to_host = self.bytes_to_device = 0
        self._host, self._hardware = host, host.hardware
        to_host, to_device = host.hardware.link_bytes_per_s, host.hardware.h2d_rate
        given = host.hardware.both_links_bytes_per_s
        both = self._both_rate = to_host + to_device if given is None else given
        self._rates = {True: min(to_host, both), False: min(to_device, both)}
        self.are_apart = both >= sum(self._rates.values())
        self._uses: list[Use] = []

    def copy(self, begin_s: float, nbytes: int, *, to_host: bool) -> float:
        """Launch a copy, and return its end. See NOTE [ First come, first served ]."""
        if to_host:
            self.bytes_to_host += nbytes
        else:
            self.bytes_to_device += nbytes
        now_s, rest_bytes = begin_s + self._hardware.copy_latency_s, float(nbytes)
        uses = self._uses_after(now_s)
        if self.are_apart:
            uses = [use for use in uses if use.to_host == to_host]
        while True:
            rate, until_s = self._free(uses, now_s, to_host=to_host), _next_change_s(uses, now_s)
            end_s = now_s + rest_bytes / rate if rate else inf
            if rate and until_s > now_s:
                self._uses.append(Use(now_s, min(end_s, until_s), rate, to_host))
            if end_s <= until_s:
                return end_s
            rest_bytes -= rate * (until_s - now_s)
            now_s = until_s

    def seconds(self, nbytes: int, *, to_host: bool) -> float:
        """Time of a copy that is alone in its direction."""
        return self._hardware.copy_latency_s + nbytes / self._rates[to_host]

    def compute(self, begin_s: float, seconds: float) -> float:
        """Return the end of compute's work of ``seconds``. See NOTE [ Slower compute ]."""
        hardware = self._hardware
        if not hardware.d2h_slowdown + hardware.h2d_slowdown:
            return begin_s + seconds
        copies, now_s = self._uses_after(begin_s), begin_s
        while True:
            ways = {use.to_host for use in _running_at(copies, now_s)}
            loss = (True in ways) * hardware.d2h_slowdown + (False in ways) * hardware.h2d_slowdown
            end_s, until_s = now_s + seconds / (1 - loss), _next_change_s(copies, now_s)
            if end_s <= until_s:
                return end_s
            seconds -= (1 - loss) * (until_s - now_s)
            now_s = until_s

    def _free(self, uses: list[Use], now_s: float, *, to_host: bool) -> float:
        """Return the rate left for another copy in this direction."""
        running = _running_at(uses, now_s)
        this_way = sum(use.bytes_per_s for use in running if use.to_host == to_host)
        both = sum(use.bytes_per_s for use in running)
        free = min(self._rates[to_host] - this_way, self._both_rate - both)
        return free if free > ROUNDING * both else 0.0

    def _uses_after(self, now_s: float) -> list[Use]:
        """Return uses that end later. A use over for the host is over for all later launches."""
        self._uses = [use for use in self._uses if use.end_s > self._host.now_s]
        return [use for use in self._uses if use.end_s > now_s]


def _running_at(uses: list[Use], now_s: float) -> list[Use]:
    return [use for use in uses if use.begin_s <= now_s < use.end_s]


def _next_change_s(uses: list[Use], now_s: float) -> float:
    """Return the time at which the next use begins or ends; infinity if none does."""
    times = (time_s for use in uses for time_s in (use.begin_s, use.end_s))
    return min((time_s for time_s in times if time_s > now_s), default=inf)
