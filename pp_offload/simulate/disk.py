"""Disk with a clock: reads and writes take their time, and nothing is written.

    disk = DiskClock(host)
    begin_s, end_s = disk.run(may_begin_s, nbytes, writes=True)

The disk tier of a virtual device uses it in place of a file's threads. A write begins when the copy
to the host has ended; a read ends before the copy to the device is launched. So the host waits for
the disk where the real one would, by its own clock.

NOTE [ One queue ]
    Work that is queued first is served first, writes and reads alike, each at its rate. A real disk
    serves several at a time, each more slowly: bytes over time are the same, and so is the end of
    the work queued last. A write that is no longer needed is made all the same.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import Tensor

from pp_offload._memory.disk_file import DiskEvent, DiskFile, DiskWrite
from pp_offload.backends import Event
from pp_offload.simulate.clocks import HostClock, VirtualEvent


class DiskClock:
    """Clock of one disk, which may have several files.

    Attributes:
        free_at_s: When all work so far has ended.
        busy_s: How long it worked.
    """

    def __init__(self, host: HostClock) -> None:
        self.host = host
        self.free_at_s = 0.0
        self.busy_s = 0.0

    def run(self, may_begin_s: float, nbytes: int, *, writes: bool) -> tuple[float, float]:
        """Queue a write or a read that may begin at ``may_begin_s``, and return begin and end.

        See NOTE [ One queue ].
        """
        hardware = self.host.hardware
        rate = hardware.disk_write_bytes_per_s if writes else hardware.disk_read_bytes_per_s
        seconds = hardware.disk_latency_s + nbytes / rate
        begin_s = max(self.free_at_s, self.host.now_s, may_begin_s)
        self.free_at_s = begin_s + seconds
        self.busy_s += seconds
        return begin_s, self.free_at_s


class ClockedWork:
    """Queued work with its end, in place of the future of a thread."""

    __slots__ = ("end_s", "host")

    def __init__(self, host: HostClock, end_s: float) -> None:
        self.host = host
        self.end_s = end_s

    def done(self) -> bool:
        """Whether the host's clock has reached the end."""
        return self.end_s <= self.host.now_s

    def result(self) -> None:
        """Have the host wait until the end."""
        self.host.wait_until(self.end_s)


class VirtualFile(DiskFile):
    """A file whose reads and writes take the time of a disk. The file is made and stays empty."""

    def __init__(self, clock: DiskClock, directory: str | os.PathLike[str] | None) -> None:
        super().__init__(directory)
        self._clock = clock

    def write(self, payloads: Sequence[Tensor], after: Sequence[Event] = ()) -> DiskWrite:
        """Take the time of a write."""
        self._open_file()
        nbytes = sum([payload.numel() for payload in payloads])
        self.written_bytes += nbytes
        work = self._work("write", nbytes, after)
        return self._in_use(DiskWrite(work, self._extent(nbytes)))

    def read_into(
        self, write: DiskWrite, payloads: Sequence[Tensor], after: Sequence[Event] = ()
    ) -> DiskEvent:
        """Take the time of a read."""
        self._open_file()
        self.read_bytes += write.extent.nbytes
        return DiskEvent(self._work("read", write.extent.nbytes, [write, *after]))

    def _work(self, name: str, nbytes: int, after: Sequence[Event]) -> ClockedWork:
        may_begin_s = max(map(_end_s, after), default=0.0)
        begin_s, end_s = self._clock.run(may_begin_s, nbytes, writes=name == "write")
        for tell in self.listeners:
            tell(name, nbytes, begin_s, end_s)
        return ClockedWork(self._clock.host, end_s)


def _end_s(event: Event) -> float:
    """Time of an event; minus infinity without an event."""
    if isinstance(event, DiskEvent) and isinstance(event.piece, ClockedWork):
        return event.piece.end_s
    return event.time_s if isinstance(event, VirtualEvent) else 0.0
