"""A device in numbers: the clocks of the virtual one, and tensors that are only their bytes.

    device = NumberDevice(DEVICES["H100"])
    device.run([1e-3])                      # compute works
    device.memory.add(512)
    source = NumberTensor(512, Held(device.memory, 512))  # until nobody refers to it
    host = HostNumbers(addresses, 512)
    device.copy(device.d2h, [host], [source], "mlp")
    torch.empty_like(host)                  # a NumberTensor again

The engine's core runs on it as on any other backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from pp_offload.simulate.clocks import HostClock, VirtualEvent, VirtualStream
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.link import Link
from pp_offload.simulate.memory import ROUNDING_BYTES


class Bytes:
    """How much is in use, and the most so far."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def add(self, nbytes: int) -> None:
        """So much more, or less."""
        self.live = live = self.live + nbytes
        if live > self.peak:
            self.peak = live

    def tensor(self, nbytes: int) -> NumberTensor:
        """A new one."""
        taken = -(-nbytes // ROUNDING_BYTES) * ROUNDING_BYTES
        self.add(taken)
        return NumberTensor(nbytes, Held(self, taken))

    def pass_by(self, nbytes: int, rise: int) -> None:
        """So much more in the end, and at most ``rise`` more on the way."""
        live = self.live
        if live + rise > self.peak:
            self.peak = live + rise
        self.live = live + nbytes


class OnDevice:
    """Where host memory of a rank comes back to: each step has a device of its own."""

    memory: Bytes


class Held:
    """Device memory that is free when nobody refers to it.

    Args:
        memory: Has counted it.
        nbytes: What an allocator gave.
    """

    __slots__ = ("_memory", "_nbytes")

    def __init__(self, memory: Bytes, nbytes: int) -> None:
        self._memory = memory
        self._nbytes = nbytes

    def __del__(self) -> None:
        self._memory.live -= self._nbytes


class NumberTensor:
    """A tensor on the device, with what the core asks of one.

    Args:
        nbytes: Of the tensor.
        held: Its memory.
    """

    __slots__ = ("__weakref__", "held", "nbytes")

    _base = None
    _version = 0
    dtype = None
    shape = ()

    def __init__(self, nbytes: int, held: Held) -> None:
        self.nbytes = nbytes
        self.held = held

    def detach(self) -> NumberTensor:
        """An alias, which is as good as itself."""
        return self

    def data_ptr(self) -> int:
        """Nobody empties its storage."""
        return 0

    def is_contiguous(self) -> bool:
        """It has no strides."""
        return True

    def _fix_weakref(self) -> None:
        """Only Python refers to it."""


class NumberPart(NumberTensor):
    """Of a tensor, to be taken out of it by compute.

    Args:
        nbytes: Of the part.
        held: Memory of the whole.
        device: Takes it out.
        gather_s: In such a time.
    """

    __slots__ = ("_device", "_gather_s")

    def __init__(self, nbytes: int, held: Held, device: NumberDevice, gather_s: float) -> None:
        super().__init__(nbytes, held)
        self._device, self._gather_s = device, gather_s

    def contiguous(self) -> NumberTensor:
        """In memory of its own."""
        self._device.run([self._gather_s])
        return self._device.memory.tensor(self.nbytes)


class HostNumbers:
    """Host memory, as the host pool deals it out: ``torch.empty_like`` makes device memory of it.

    Args:
        rank: Whose it is.
        nbytes: How much.
    """

    __slots__ = ("_rank", "nbytes")

    dtype = None
    shape = ()

    def __init__(self, rank: OnDevice, nbytes: int) -> None:
        self._rank = rank
        self.nbytes = nbytes

    def __deepcopy__(self, memo: object) -> HostNumbers:
        """Itself: it never changes."""
        return self

    def numel(self) -> int:
        """Of bytes."""
        return self.nbytes

    def narrow(self, dim: int, start: int, length: int) -> HostNumbers:
        """So much of it."""
        return HostNumbers(self._rank, length)

    def view(self, what: object) -> HostNumbers:
        """It has no shape and no dtype."""
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> NumberTensor:
        """``torch.empty_like``, the only function that the core calls with it."""
        (host,) = args
        return host._rank.memory.tensor(host.nbytes)


class NumberDevice:
    """Streams with clocks; a backend of the core.

    Args:
        hardware: What it is like.

    Attributes:
        memory: Of the device.
    """

    device = torch.device("meta")
    is_capturing = is_host = False

    def __init__(self, hardware: Hardware) -> None:
        self.memory = Bytes()
        self.host = HostClock(hardware)
        self.link = Link(self.host)
        self._streams: list[VirtualStream] = []
        self.compute, self.d2h, self.h2d = (self.new_stream() for _ in range(3))
        # Then copies share a rate with nothing, for each direction has one stream.
        self._copies_are_alone = self.link.are_apart and not hardware.copies_slow_compute

    @property
    def seconds(self) -> float:
        """When all that was launched so far has ended."""
        return max(self.host.now_s, *(stream.free_at_s for stream in self._streams))

    def new_stream(self) -> VirtualStream:
        """Another stream, ordered with nothing."""
        self._streams.append(VirtualStream(self.host))
        return self._streams[-1]

    def synchronize(self) -> None:
        """Have the host wait for all of it."""
        self.host.wait_until(self.seconds)

    def current_stream(self) -> VirtualStream:
        """The only one that computes."""
        return self.compute

    def timed_event(self, stream: VirtualStream) -> VirtualEvent:
        """A new event, for all of them know their time."""
        return stream.record_event()

    def run(self, operators_s: Sequence[float]) -> None:
        """Launch operators that take so long by themselves."""
        if not self.host.hardware.copies_slow_compute:
            self.compute.launch_all(operators_s)
            return
        for took_s in operators_s:
            self.compute.launch_until(partial(self.link.compute, seconds=took_s))

    def copy(
        self, stream: VirtualStream, targets: Sequence[Any], sources: Sequence[Any], label: str
    ) -> None:
        """Launch copies one behind the other."""
        sizes = [target.nbytes for target in targets]
        to_host = stream is self.d2h
        if self._copies_are_alone:
            stream.launch_all([self.link.seconds(nbytes, to_host=to_host) for nbytes in sizes])
            return
        for nbytes in sizes:
            stream.launch_until(partial(self.link.copy, nbytes=nbytes, to_host=to_host))
