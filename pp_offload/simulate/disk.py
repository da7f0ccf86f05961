"""Disk with a clock: reads and writes take time, but nothing is written.

The disk tier of a virtual device uses it in place of a file's threads. A write begins when the copy
to the host has ended; a read ends before the copy to the device is launched. So the host waits for
the disk where the real one would, by its own clock.

NOTE [ One queue ]
    Work that is queued first is served first, writes and reads alike, each at its rate. A real disk
    serves several at a time, each more slowly: bytes over time are the same, and so is the end of
    the work queued last. A write that is no longer needed is made nevertheless.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pp_offload._memory.disk_file import DiskEvent, DiskFile, DiskWrite, Extent
from pp_offload.simulate.clocks import HostClock, VirtualEvent


class DiskClock:
    """Clock of a disk, which may have several files.

    Attributes:
        free_at_s: Time at which all work so far has ended.
        busy_s: Time in which the disk worked.
    """

    def __init__(self, host: HostClock) -> None:
        self.host = host
        self.free_at_s = self.busy_s = 0.0

    def run(self, may_begin_s: float, nbytes: int, *, writes: bool) -> float:
        """Queue a write or a read, and return its begin. See NOTE [ One queue ]."""
        hardware = self.host.hardware
        rate = hardware.disk_write_bytes_per_s if writes else hardware.disk_read_bytes_per_s
        seconds = hardware.disk_latency_s + nbytes / rate
        begin_s = max(self.free_at_s, self.host.now_s, may_begin_s)
        self.free_at_s = begin_s + seconds
        self.busy_s += seconds
        return begin_s


class VirtualFile(DiskFile):
    """A file whose reads and writes only take the time of a disk. None is made, and it is never
    full.
    """

    def __init__(self, clock: DiskClock) -> None:
        self._clock = clock
        self.listeners = ()
        self.written_bytes = self.read_bytes = self.peak_bytes = self._in_use_bytes = 0
        self._live, self._dead = {}, deque()

    def write(self, payloads: Sequence[Tensor], after: Sequence[Any] = ()) -> DiskWrite:
        self._collect()
        nbytes = sum(payload.numel() for payload in payloads)
        self.written_bytes += nbytes
        return self._in_use(DiskWrite(self._work("write", nbytes, after), Extent(0, nbytes)))

    def read_into(
        self, write: DiskWrite, payloads: Sequence[Tensor], after: Sequence[Any] = ()
    ) -> DiskEvent:
        self.read_bytes += write.extent.nbytes
        return DiskEvent(self._work("read", write.extent.nbytes, [write, *after]))

    def close(self) -> None:
        """Close nothing."""

    def _work(self, name: str, nbytes: int, after: Sequence[Any]) -> VirtualEvent:
        """Queue work after events of streams and of this disk."""
        events = [getattr(event, "piece", event) for event in after]
        may_begin_s = max((event.time_s for event in events), default=0.0)
        begin_s = self._clock.run(may_begin_s, nbytes, writes=name == "write")
        for tell in self.listeners:
            tell(name, nbytes, begin_s, self._clock.free_at_s)
        return VirtualEvent(self._clock.host, self._clock.free_at_s)
