"""Link between a device and its host: copies take parts of its rate over stretches of time.

    link = Link(host)
    d2h.launch_until(lambda begin_s: link.copy(begin_s, nbytes, to_host=True))
    link.bytes_to_host

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

from math import inf
from typing import NamedTuple

from pp_offload.simulate.clocks import HostClock

ROUNDING = 1e-9
"""Part of a fully used rate that rounding leaves over."""


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
