"""A device in numbers: the clocks of the virtual one, and tensors that are only their bytes.

    device = NumberDevice(DEVICES["H100"])
    device.run([1e-3])                      # compute works
    device.memory.add(512)
    source = NumberTensor(512, Held(device.memory, 512))  # until nobody refers to it
    host = device.allocate_host(512)
    device.copy(device.d2h, [host], [source], "mlp")
    torch.empty_like(host)                  # a NumberTensor again

The engine's core runs on it as on any other backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from pp_offload._memory.disk_file import DiskWrite, Extent
from pp_offload.simulate.clocks import VirtualStream
from pp_offload.simulate.device import VirtualBackend
from pp_offload.simulate.disk import DiskClock, VirtualFile
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.memory import ROUNDING_BYTES


class Bytes:
    """How much is in use, and the most so far."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    @property
    def live_bytes(self) -> int:
        """As of :class:`DeviceMemory`."""
        return self.live

    @property
    def peak_bytes(self) -> int:
        """As of :class:`DeviceMemory`."""
        return self.peak

    def take_peak(self) -> None:
        """As of :class:`DeviceMemory`."""
        self.peak = self.live

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
        device: Where it comes back to.
        nbytes: How much.
    """

    __slots__ = ("_device", "nbytes")

    dtype = None
    shape = ()

    def __init__(self, device: NumberDevice, nbytes: int) -> None:
        self._device = device
        self.nbytes = nbytes

    def __deepcopy__(self, memo: object) -> HostNumbers:
        """Itself: it never changes."""
        return self

    def numel(self) -> int:
        """Of bytes."""
        return self.nbytes

    def narrow(self, dim: int, start: int, length: int) -> HostNumbers:
        """So much of it."""
        return HostNumbers(self._device, length)

    def view(self, what: object) -> HostNumbers:
        """It has no shape and no dtype."""
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> NumberTensor:
        """``torch.empty_like``, the only function that the core calls with it."""
        (host,) = args
        return host._device.memory.tensor(host.nbytes)


class NumberFile(VirtualFile):
    """A file of which only the times of reads and writes are counted.

    Args:
        clock: Of the disk.
    """

    in_use_bytes = peak_bytes = 0

    def __init__(self, clock: DiskClock) -> None:
        self._clock = clock
        self.listeners = ()
        self.written_bytes = self.read_bytes = 0

    def _open_file(self) -> Any:
        """Nothing is written."""

    def _extent(self, nbytes: int) -> Extent:
        return Extent(0, nbytes)  # a disk has no end

    def _in_use(self, write: DiskWrite) -> DiskWrite:
        return write


class NumberDevice(VirtualBackend):
    """A virtual device for tensors that are only their bytes.

    Args:
        hardware: What it is like.
    """

    memory: Any
    """Of the step; a new one begins with :meth:`begin_step`."""

    def __init__(self, hardware: Hardware) -> None:
        super().__init__(hardware)
        self.begin_step(0)
        # Then copies share a rate with nothing, for each direction has one stream.
        self._copies_are_alone = self.link.are_apart and not hardware.copies_slow_compute

    def begin_step(self, taken_bytes: int) -> None:
        """A step begins with so many bytes in use: what is gone then counts in the last step."""
        self.memory = Bytes()
        self.memory.add(taken_bytes)

    def current_stream(self) -> VirtualStream:
        """The only one that computes."""
        return self.compute

    def open_disk(self, directory: object) -> VirtualFile:
        """A file that is not there, on the device's disk."""
        return NumberFile(self.disk)

    def allocate_host(self, nbytes: int) -> Any:
        """Pinning takes its time."""
        if self.hardware.pin_bytes_per_s is not None:
            self.host.now_s += nbytes / self.hardware.pin_bytes_per_s
        return HostNumbers(self, nbytes)

    def run(self, operators_s: Sequence[float]) -> None:
        """Launch operators that take so long by themselves."""
        if not self.hardware.copies_slow_compute:
            self.compute.launch_all(operators_s)
            return
        for took_s in operators_s:
            self.compute.launch_until(partial(self.link.compute, seconds=took_s))

    def copy(self, stream: Any, targets: Sequence[Any], sources: Sequence[Any], label: str) -> None:
        """Launch copies one behind the other."""
        sizes = [target.nbytes for target in targets]
        to_host = stream is self.d2h
        if self._copies_are_alone:
            stream.launch_all([self.link.seconds(nbytes, to_host=to_host) for nbytes in sizes])
            return
        for nbytes in sizes:
            stream.launch_until(partial(self.link.copy, nbytes=nbytes, to_host=to_host))
