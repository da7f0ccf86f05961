"""The clock of a recording: from events of a device to the seconds of a timeline.

    clock = Clock.started(backend, begin)  # begin was recorded on compute
    ...
    clock.seconds(event)                   # of one that is over
    clock.drift_s(backend, event)          # how far it went from the wall clock since

Virtual events and those timed by the host say their time themselves. For a device's own events the
host waits for one of them as the recording begins, and takes the wall clock's time beside it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from pp_offload.backends import Backend, CpuBackend, HostTimed, TimedEvent

DEVICE, HOST, AS_QUEUED, VIRTUAL = "device", "host", "host, as queued", "virtual"


@dataclass(frozen=True)
class Clock:
    """Made where a recording begins."""

    kind: str
    """Whose it is: ``device``, ``host`` or ``virtual``. With ``host, as queued``, copies have the
    time at which the host queued them, for nobody knows when such a device runs them.
    """

    base_ns: int
    """What its seconds count from, on the wall clock; 0 for a virtual device's own begin."""

    _begin: TimedEvent
    _host_s: float
    """What ``time.perf_counter`` said at the base."""

    @classmethod
    def started(cls, backend: Backend, begin: TimedEvent) -> Clock:
        """From now on. Of a device with a clock, the host waits for ``begin``, once."""
        if is_virtual(backend):
            return cls(VIRTUAL, 0, begin, time.perf_counter())
        begin.synchronize()
        now_ns, now_s = time.time_ns(), time.perf_counter()
        if isinstance(begin, HostTimed):
            kind = HOST if isinstance(backend, CpuBackend) else AS_QUEUED
            return cls(kind, now_ns, begin, now_s)
        return cls(DEVICE, now_ns, begin, now_s)

    def seconds(self, event: Any) -> float | None:
        """Of an event that is over; None if it has no time, as behind a copy that failed."""
        if self.kind == DEVICE:
            try:
                return self._begin.elapsed_time(event) / 1e3
            except RuntimeError:
                return None
        if self.kind == VIRTUAL:  # a stream that has nothing to do passes it when it is recorded
            return float(max(event.time_s, event.recorded_s))
        return None if event.time_s is None else self.of_host(event.time_s)

    def of_host(self, counter_s: float) -> float:
        """Of a time that ``time.perf_counter`` gave; a virtual disk's are of its own clock."""
        return counter_s if self.kind == VIRTUAL else counter_s - self._host_s

    def drift_s(self, event: TimedEvent) -> float | None:
        """How much later the wall clock is than this one. Waits for ``event``, recorded just now.

        Of a device's own, what the host needs to see an event is part of it: some microseconds.
        """
        if self.kind == VIRTUAL:
            return None
        event.synchronize()
        now_ns, here_s = time.time_ns(), self.seconds(event)
        return None if here_s is None else (now_ns - self.base_ns) / 1e9 - here_s


def is_virtual(backend: Backend) -> bool:
    """Whether its streams say when their work runs, and wait for nobody to ask."""
    return hasattr(backend.d2h, "heard")
