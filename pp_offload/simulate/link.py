"""The link between a device and its host: copies take parts of its rate over stretches of time.

    link = Link(host)
    d2h.launch_until(lambda begin_s: link.copy(begin_s, nbytes, to_host=True))
    link.bytes_to_host

NOTE [ First come, first served ]
    A copy gets its end when it is launched, so the rate given to it cannot be taken away. A copy
    launched later gets the rest: of the rate of its direction, and of that of both. So the link
    never does more than it can, and never less than it is asked for: bytes over time are exact, and
    so is the end of copies one after the other. Approximated is which of two has to wait: on a
    device both would go on at half of the rate, here the first goes on at the whole.

NOTE [ Slower compute ]
    An operator is slowed down by the copies that were launched before it. That is exact for copies
    that wait for all that compute has when they are launched, as the engine's do. A copy that does
    not wait slows down none of the operators that were launched before.
"""

from __future__ import annotations

from bisect import bisect_right
from math import inf
from typing import NamedTuple

from pp_offload.simulate.clocks import HostClock

ROUNDING = 1e-9
"""Part of a used rate that rounding leaves of a link that is used up."""


class Use(NamedTuple):
    """Part of the rate that a copy has for some time."""

    begin_s: float
    end_s: float
    bytes_per_s: float
    to_host: bool


class Link:
    """Link that gives copies their ends, and counts their bytes.

    Attributes:
        bytes_to_host: Bytes that left the device so far.
        bytes_to_device: Bytes that came.
        are_apart: Whether copies in one direction take nothing from those in the other.
    """

    def __init__(self, host: HostClock) -> None:
        self.bytes_to_host = 0
        self.bytes_to_device = 0
        self._host = host
        self._hardware = host.hardware
        both = self._both_rate = host.hardware.both_copies_bytes_per_s
        to_host, to_device = host.hardware.d2h_rate, host.hardware.h2d_rate
        self._rates = {True: min(to_host, both), False: min(to_device, both)}
        self.are_apart = both >= sum(self._rates.values())
        self._uses: list[Use] = []
        self._last_ends_s: list[float] = []
        """For each use, when it and all before it are over: uses may end out of order."""

    def copy(self, begin_s: float, nbytes: int, *, to_host: bool) -> float:
        """Launch a copy, and return its end. See NOTE [ First come, first served ]."""
        if to_host:
            self.bytes_to_host += nbytes
        else:
            self.bytes_to_device += nbytes
        self._forget_past()
        now_s, rest_bytes = begin_s + self._hardware.copy_latency_s, float(nbytes)
        uses = self._uses_after(now_s)
        if self.are_apart:
            uses = [use for use in uses if use.to_host == to_host]
        while True:
            rate, until_s = self._free(uses, now_s, to_host=to_host), next_change_s(uses, now_s)
            end_s = now_s + rest_bytes / rate if rate else inf
            if rate and until_s > now_s:
                self._note(Use(now_s, min(end_s, until_s), rate, to_host))
            if end_s <= until_s:
                return end_s
            rest_bytes -= rate * (until_s - now_s)
            now_s = until_s

    def seconds(self, nbytes: int, *, to_host: bool) -> float:
        """Time of a copy that shares its direction with no other copy."""
        return self._hardware.copy_latency_s + nbytes / self._rates[to_host]

    def compute(self, begin_s: float, seconds: float) -> float:
        """End of compute's work of ``seconds`` beside copies. See NOTE [ Slower compute ]."""
        hardware = self._hardware
        if not hardware.copies_slow_compute:
            return begin_s + seconds
        self._forget_past()
        copies, now_s = self._uses_after(begin_s), begin_s
        while True:
            ways = {use.to_host for use in running_at(copies, now_s)}
            loss = (True in ways) * hardware.d2h_slowdown + (False in ways) * hardware.h2d_slowdown
            end_s, until_s = now_s + seconds / (1 - loss), next_change_s(copies, now_s)
            if end_s <= until_s:
                return end_s
            seconds -= (1 - loss) * (until_s - now_s)
            now_s = until_s

    def _free(self, uses: list[Use], now_s: float, *, to_host: bool) -> float:
        """Rate that is free for another copy in this direction."""
        running = running_at(uses, now_s)
        here = sum(use.bytes_per_s for use in running if use.to_host == to_host)
        both = sum(use.bytes_per_s for use in running)
        free = min(self._rates[to_host] - here, self._both_rate - both)
        return free if free > ROUNDING * both else 0.0

    def _note(self, use: Use) -> None:
        before_s = self._last_ends_s[-1] if self._uses else 0.0
        self._uses.append(use)
        self._last_ends_s.append(max(before_s, use.end_s))

    def _uses_after(self, now_s: float) -> list[Use]:
        first = bisect_right(self._last_ends_s, now_s)
        return [use for use in self._uses[first:] if use.end_s > now_s]

    def _forget_past(self) -> None:
        """Drop uses that are over for the host, and so for all that it launches from now on."""
        num = bisect_right(self._last_ends_s, self._host.now_s)
        if num:
            del self._uses[:num], self._last_ends_s[:num]


def running_at(uses: list[Use], now_s: float) -> list[Use]:
    """List the uses that have begun and not ended."""
    return [use for use in uses if use.begin_s <= now_s < use.end_s]


def next_change_s(uses: list[Use], now_s: float) -> float:
    """Time at which the next use begins or ends; infinity if none does."""
    times = (time_s for use in uses for time_s in (use.begin_s, use.end_s))
    return min((time_s for time_s in times if time_s > now_s), default=inf)
