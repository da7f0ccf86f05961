"""A device in numbers: clocks of a virtual device, and tensors that are only sizes.

    device.run([1e-3])                      # compute runs an operator
    source = device.memory.tensor(512)      # freed with its last reference
    host = device.allocate_host(512)
    torch.empty_like(host)                  # a NumberTensor again

The engine's core runs on it as on any other backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pp_offload.simulate.device import VirtualBackend
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.memory import rounded


class Bytes:
    """Counter of the bytes in use, and of their peak, in place of :class:`DeviceMemory`."""

    def __init__(self, taken_bytes: int = 0) -> None:
        self.live_bytes = self.peak_bytes = taken_bytes

    def take_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def pass_by(self, nbytes: int, rise: int) -> None:
        """Count ``nbytes`` more in the end, and at most ``rise`` more on the way."""
        live = self.live_bytes
        if live + rise > self.peak_bytes:
            self.peak_bytes = live + rise
        self.live_bytes = live + nbytes

    def tensor(self, nbytes: int) -> NumberTensor:
        taken = rounded(nbytes)
        self.pass_by(taken, taken)
        return NumberTensor(nbytes, Held(self, taken))


class Held:
    """Device memory, already counted, which is freed with the last reference to this object."""

    __slots__ = ("_memory", "_nbytes")

    def __init__(self, memory: Bytes, nbytes: int) -> None:
        self._memory = memory
        self._nbytes = nbytes

    def __del__(self) -> None:
        self._memory.live_bytes -= self._nbytes


class NumberTensor:
    """A tensor on the device, with the attributes that the core reads. ``contiguous`` copies the
    tensor, if it is a part of its memory.
    """

    __slots__ = ("__weakref__", "contiguous", "held", "nbytes")

    _base = None
    _version = 0
    dtype = None
    shape = ()

    def __init__(
        self, nbytes: int, held: Held, contiguous: Callable[[], NumberTensor] | None = None
    ) -> None:
        self.nbytes = nbytes
        self.held = held
        self.contiguous = contiguous

    def detach(self) -> NumberTensor:
        return self

    def data_ptr(self) -> int:
        return 0  # no storage is ever emptied

    def is_contiguous(self) -> bool:
        return True

    def _fix_weakref(self) -> None:
        """Do nothing: only Python refers to the tensor."""


class HostNumbers:
    """Host memory of the host pool; ``torch.empty_like`` allocates device memory of its size."""

    __slots__ = ("_device", "nbytes")

    def __init__(self, device: NumberDevice, nbytes: int) -> None:
        self._device = device
        self.nbytes = nbytes

    def numel(self) -> int:
        return self.nbytes

    def narrow(self, dim: int, start: int, length: int) -> HostNumbers:
        return HostNumbers(self._device, length)

    def view(self, what: object) -> HostNumbers:
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> NumberTensor:
        """Run ``torch.empty_like``, the only function that the core calls with host memory."""
        (host,) = args
        return host._device.memory.tensor(host.nbytes)


class NumberDevice(VirtualBackend):
    """Virtual device for tensors that are only their bytes."""

    memory: Any
    """Memory of the step, a new :class:`Bytes` for each step: tensors of earlier steps are counted
    in the earlier one.
    """

    def __init__(self, hardware: Hardware) -> None:
        super().__init__(hardware)
        self.memory = Bytes()

    def allocate_host(self, nbytes: int) -> Any:
        self.pin(nbytes)
        return HostNumbers(self, nbytes)

    def run(self, operators_s: Sequence[float]) -> None:
        """Launch operators, which take these times if no copy slows them down."""
        for took_s in operators_s:
            self.compute.launch_until(partial(self.link.compute, seconds=took_s))

    def gather(self, nbytes: int, seconds: float) -> NumberTensor:
        """Copy a part of a tensor into memory of its own."""
        self.run([seconds])
        return self.memory.tensor(nbytes)
