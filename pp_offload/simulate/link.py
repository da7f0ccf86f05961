"""The link between a device and its host: copies take parts of its rate over stretches of time.

    link = Link(host)
    d2h.launch_until(lambda begin_s: link.copy(begin_s, nbytes, to_host=True))
    link.bytes_to_host

NOTE [ First come, first served ]
    A copy gets its end when it is launched, so what was given to it cannot be taken away. One that
    is launched later gets what is left: of the rate of its direction, and of that of both. So the
    link never does more than it can, and never less than it is asked for: bytes of a time are
    exact, and so is the end of copies one after the other. Approximated is who of two has to wait:
    on a device both would go on at half of the rate, here the first goes on at the whole.

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

NOTHING = 1e-9
"""Of what is used: what rounding leaves of a link that is used up."""


class Use(NamedTuple):
    """A part of the rate that a copy has for some time."""

    begin_s: float
    end_s: float
    bytes_per_s: float
    to_host: bool


class Link:
    """Gives copies their ends, and counts their bytes.

    Args:
        host: Launches them, and has the hardware.

    Attributes:
        bytes_to_host: That left the device so far.
        bytes_to_device: That came.
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
        """By use, when it and all before it are over."""

    def copy(self, begin_s: float, nbytes: int, *, to_host: bool) -> float:
        """When a copy that is launched now ends. See NOTE [ First come, first served ].

        Args:
            begin_s: When it begins.
            nbytes: Of one side.
            to_host: Else to the device.
        """
        if to_host:
            self.bytes_to_host += nbytes
        else:
            self.bytes_to_device += nbytes
        self._forget_past()
        return self._take(begin_s + self._hardware.copy_latency_s, nbytes, to_host=to_host)

    def seconds(self, nbytes: int, *, to_host: bool) -> float:
        """How long a copy takes that shares its direction with no other."""
        return self._hardware.copy_latency_s + nbytes / self._rates[to_host]

    def _take(self, now_s: float, nbytes: float, *, to_host: bool) -> float:
        """Use what is left of the rate from now on, until the bytes are over."""
        others = self._uses_after(now_s)
        if others and self.are_apart:
            others = [use for use in others if use.to_host == to_host]
        if not others:  # nearly always
            end_s = now_s + nbytes / self._rates[to_host]
            self._note(Use(now_s, end_s, self._rates[to_host], to_host))
            return end_s
        while True:
            rate, until_s = self._left(others, now_s, to_host=to_host), next_change_s(others, now_s)
            end_s = now_s + nbytes / rate if rate else inf
            if rate and until_s > now_s:
                self._note(Use(now_s, min(end_s, until_s), rate, to_host))
            if end_s <= until_s:
                return end_s
            nbytes -= rate * (until_s - now_s)
            now_s = until_s

    def _note(self, use: Use) -> None:
        before_s = self._last_ends_s[-1] if self._uses else 0.0
        self._uses.append(use)
        self._last_ends_s.append(max(before_s, use.end_s))

    def _left(self, others: list[Use], now_s: float, *, to_host: bool) -> float:
        """Of the rate, for one more copy in this direction."""
        running = running_at(others, now_s)
        here = sum(use.bytes_per_s for use in running if use.to_host == to_host)
        both = sum(use.bytes_per_s for use in running)
        free = min(self._rates[to_host] - here, self._both_rate - both)
        return free if free > NOTHING * both else 0.0

    def compute(self, begin_s: float, seconds: float) -> float:
        """When work of a compute stream ends that takes so long by itself.

        See NOTE [ Slower compute ].
        """
        hardware = self._hardware
        if not hardware.copies_slow_compute:
            return begin_s + seconds
        self._forget_past()
        copies, now_s = self._uses_after(begin_s), begin_s
        while True:
            ways = {use.to_host for use in running_at(copies, now_s)}
            speed = (
                1 - (True in ways) * hardware.d2h_slowdown - (False in ways) * hardware.h2d_slowdown
            )
            end_s, until_s = now_s + seconds / speed, next_change_s(copies, now_s)
            if end_s <= until_s:
                return end_s
            seconds -= speed * (until_s - now_s)
            now_s = until_s

    def _uses_after(self, now_s: float) -> list[Use]:
        first = bisect_right(self._last_ends_s, now_s)
        return [use for use in self._uses[first:] if use.end_s > now_s]

    def _forget_past(self) -> None:
        """What is over for the host is over for all that it launches from now on."""
        num = bisect_right(self._last_ends_s, self._host.now_s)
        if num:
            del self._uses[:num], self._last_ends_s[:num]


def running_at(uses: list[Use], now_s: float) -> list[Use]:
    """Those that have begun and not ended."""
    return [use for use in uses if use.begin_s <= now_s < use.end_s]


def next_change_s(uses: list[Use], now_s: float) -> float:
    """When one of them begins or ends after that; never, if none does."""
    times = (time_s for use in uses for time_s in (use.begin_s, use.end_s))
    return min((time_s for time_s in times if time_s > now_s), default=inf)
