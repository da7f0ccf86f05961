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
    """Counter of the bytes in use, and of their peak."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    @property
    def live_bytes(self) -> int:
        """Bytes in use; see :class:`DeviceMemory`."""
        return self.live

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use so far; see :class:`DeviceMemory`."""
        return self.peak

    def take_peak(self) -> None:
        """Begin a new peak; see :class:`DeviceMemory`."""
        self.peak = self.live

    def add(self, nbytes: int) -> None:
        """Count bytes that were allocated, or freed if ``nbytes`` is below 0."""
        self.live = live = self.live + nbytes
        if live > self.peak:
            self.peak = live

    def tensor(self, nbytes: int) -> NumberTensor:
        """Allocate a tensor."""
        taken = -(-nbytes // ROUNDING_BYTES) * ROUNDING_BYTES
        self.add(taken)
        return NumberTensor(nbytes, Held(self, taken))

    def pass_by(self, nbytes: int, rise: int) -> None:
        """Count ``nbytes`` more in the end, and at most ``rise`` more on the way."""
        live = self.live
        if live + rise > self.peak:
            self.peak = live + rise
        self.live = live + nbytes


class Held:
    """Device memory, which is free when the last reference to this object goes.

    Args:
        memory: Counter of the memory.
        nbytes: Bytes that an allocator gave.
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
        """Return the tensor itself, which serves as its alias."""
        return self

    def data_ptr(self) -> int:
        """Return a constant: the storage is never emptied."""
        return 0

    def is_contiguous(self) -> bool:
        """Return True: the tensor has no strides."""
        return True

    def _fix_weakref(self) -> None:
        """Do nothing: only Python refers to the tensor."""


class NumberPart(NumberTensor):
    """Part of a tensor, which compute copies out of it.

    Args:
        nbytes: Of the part.
        held: Memory of the whole.
        device: Runs the copy.
        gather_s: Time of the copy.
    """

    __slots__ = ("_device", "_gather_s")

    def __init__(self, nbytes: int, held: Held, device: NumberDevice, gather_s: float) -> None:
        super().__init__(nbytes, held)
        self._device, self._gather_s = device, gather_s

    def contiguous(self) -> NumberTensor:
        """Copy the part into memory of its own."""
        self._device.run([self._gather_s])
        return self._device.memory.tensor(self.nbytes)


class HostNumbers:
    """Host memory of the host pool; ``torch.empty_like`` makes device memory of it.

    Args:
        device: Device that its bytes come back to.
        nbytes: Size of the memory.
    """

    __slots__ = ("_device", "nbytes")

    dtype = None
    shape = ()

    def __init__(self, device: NumberDevice, nbytes: int) -> None:
        self._device = device
        self.nbytes = nbytes

    def __deepcopy__(self, memo: object) -> HostNumbers:
        """Return the object itself, which never changes."""
        return self

    def numel(self) -> int:
        """Number of bytes."""
        return self.nbytes

    def narrow(self, dim: int, start: int, length: int) -> HostNumbers:
        """Return ``length`` bytes of this memory."""
        return HostNumbers(self._device, length)

    def view(self, what: object) -> HostNumbers:
        """Return the memory itself: it has no shape and no dtype."""
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> NumberTensor:
        """Run ``torch.empty_like``, the only function that the core calls with host memory."""
        (host,) = args
        return host._device.memory.tensor(host.nbytes)


class NumberFile(VirtualFile):
    """File whose reads and writes only take their time.

    Args:
        clock: Of the disk.
    """

    in_use_bytes = peak_bytes = 0

    def __init__(self, clock: DiskClock) -> None:
        self._clock = clock
        self.listeners = ()
        self.written_bytes = self.read_bytes = 0

    def _open_file(self) -> Any:
        """Open no file: nothing is written."""

    def _extent(self, nbytes: int) -> Extent:
        return Extent(0, nbytes)  # a disk has no end

    def _in_use(self, write: DiskWrite) -> DiskWrite:
        return write


class NumberDevice(VirtualBackend):
    """Virtual device for tensors that are only their bytes.

    Args:
        hardware: Figures of the device.
    """

    memory: Any
    """Memory of the step; :meth:`begin_step` makes a new one."""

    def __init__(self, hardware: Hardware) -> None:
        super().__init__(hardware)
        self.begin_step(0)
        # Then copies share a rate with nothing, for each direction has one stream.
        self._copies_are_alone = self.link.are_apart and not hardware.copies_slow_compute

    def begin_step(self, taken_bytes: int) -> None:
        """Begin a step with ``taken_bytes`` in use. Older tensors count in the last step."""
        self.memory = Bytes()
        self.memory.add(taken_bytes)

    def current_stream(self) -> VirtualStream:
        """The compute stream, which is the only one of the device."""
        return self.compute

    def open_disk(self, directory: object) -> VirtualFile:
        """Make a file on the device's disk, of which nothing is written."""
        return NumberFile(self.disk)

    def allocate_host(self, nbytes: int) -> Any:
        """Allocate host memory, in the time that pinning takes."""
        if self.hardware.pin_bytes_per_s is not None:
            self.host.now_s += nbytes / self.hardware.pin_bytes_per_s
        return HostNumbers(self, nbytes)

    def run(self, operators_s: Sequence[float]) -> None:
        """Launch operators, which take these times if no copy slows them down."""
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
