"""A device in numbers: the clocks of the virtual one, and bytes without tensors.

device = NumberDevice(DEVICES["H100"])
device.run([1e-3])                  # compute works
event = device.copy([2**20], to_host=True)
device.memory.add(512)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from pp_offload.simulate.clocks import HostClock, VirtualEvent, VirtualStream
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.link import Link


class Bytes:
    """How much is in use, and the most so far."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def add(self, nbytes: int) -> None:
        """So much more, or less."""
        self.live = live = self.live + nbytes
        if live > self.peak:
            self.peak = live

    def pass_by(self, nbytes: int, rise: int) -> None:
        """So much more in the end, and at most ``rise`` more on the way."""
        live = self.live
        if live + rise > self.peak:
            self.peak = live + rise
        self.live = live + nbytes


class NumberDevice:
    """Streams with clocks.

    Args:
        hardware: What it is like.

    Attributes:
        memory: Of the device.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.host = HostClock(hardware)
        self.link = Link(self.host)
        self._streams: list[VirtualStream] = []
        self.compute = self.new_stream()
        self.d2h = self.new_stream()
        self.h2d = self.new_stream()
        self.memory = Bytes()
        # Then copies share a rate with nothing, for each direction has one stream.
        self._copies_are_alone = self.link.are_apart and not hardware.copy_slowdown

    def new_stream(self) -> VirtualStream:
        """Another stream, ordered with nothing."""
        self._streams.append(VirtualStream(self.host))
        return self._streams[-1]

    @property
    def seconds(self) -> float:
        """When all that was launched so far has ended."""
        return max(self.host.now_s, *(one.free_at_s for one in self._streams))

    def synchronize(self) -> None:
        """Have the host wait for all of it."""
        self.host.wait_until(self.seconds)

    def run(self, operators_s: Sequence[float]) -> None:
        """Launch operators that take so long by themselves."""
        if not self.host.hardware.copy_slowdown:
            self.compute.launch_all(operators_s)
            return
        for took_s in operators_s:
            self.compute.launch_until(partial(self.link.compute, seconds=took_s))

    def copy(self, sizes: Iterable[int], *, to_host: bool) -> VirtualEvent:
        """Launch copies of so many bytes, one behind the other; what is behind them."""
        stream = self.d2h if to_host else self.h2d
        if self._copies_are_alone:
            stream.launch_all([self.link.seconds(nbytes) for nbytes in sizes])
        else:
            for nbytes in sizes:
                self._copy_one(stream, nbytes, to_host=to_host)
        return stream.record_event()

    def _copy_one(self, stream: VirtualStream, nbytes: int, *, to_host: bool) -> None:
        stream.launch_until(lambda begin_s: self.link.copy(begin_s, nbytes, to_host=to_host))
