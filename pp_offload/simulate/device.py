"""Virtual device without data, on which the engine runs unchanged and all work takes time.

    backend = VirtualBackend(DEVICES["H100"])
    with use_backend(backend):
        loss = model(x)         # on meta
        loss.backward()
    backend.seconds             # until all work has run
    backend.memory.peak_bytes

NOTE [ Memory in the host's order ]
    A caching allocator returns memory to its stream when the host drops the tensor, whatever that
    stream has yet to run. So allocated bytes change in the host's order, not by clocks.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from pp_offload._common.checks import check_kind
from pp_offload._common.operators import operator
from pp_offload._common.torch_private import TorchDispatchMode
from pp_offload._memory.addresses import has_storage
from pp_offload.backends.base import Allocated, HasLiveStream, Stream
from pp_offload.simulate.clocks import HostClock, Link, VirtualEvent, VirtualStream
from pp_offload.simulate.costs import (
    OperatorCosts,
    OperatorSeconds,
    accelerator_kernels,
    tensors_in,
)
from pp_offload.simulate.hardware import Hardware

NO_RESERVE = 0x4000  # flag MAP_NORESERVE of Linux, which Python names from 3.12 on

aten = torch.ops.aten


class VirtualBackend(HasLiveStream[VirtualStream]):
    """Backend with tensors on ``meta`` as device tensors, and streams with clocks.

    Host memory is requested from the system and never touched, so it takes only addresses.

    Args:
        hardware: Figures of the device.
        operator_seconds: Function of an overload, its arguments, its named arguments and its
            outputs that returns the operator's measured time, or None for a time from the rates.
        is_blocking: Whether the host waits for each operator, as with ``CUDA_LAUNCH_BLOCKING=1``.
            Copied memory is then freed as early as possible, and peaks are lower than with a host
            that runs ahead.

    Raises:
        TypeError: ``hardware`` is something else.

    Attributes:
        host: The host's clock.
        compute: The compute stream that is current unless another is entered.
        link: The link to the host, with counts of its bytes.
        memory: Device memory of the tensors seen.
    """

    is_host = False
    is_capturing = False

    def __init__(
        self,
        hardware: Hardware,
        operator_seconds: OperatorSeconds | None = None,
        *,
        is_blocking: bool = False,
    ) -> None:
        check_kind("hardware", hardware, Hardware, "a Hardware", 'write DEVICES["H100"]')
        self.costs = OperatorCosts(hardware, operator_seconds)
        self.hardware, self.is_blocking = hardware, is_blocking
        self.name, self.device = f"virtual {hardware.name}", torch.device("meta")
        self.host = HostClock(hardware)
        self.link = Link(self.host)
        self.memory = DeviceMemory(hardware.workspace_bytes)
        self._streams: list[VirtualStream] = []
        self.compute = self._current = self.new_stream()
        self.d2h: Stream = self.new_stream()
        self.h2d: Stream = self.new_stream()

    @property
    def seconds(self) -> float:
        """Time at which all work launched so far has ended."""
        return max(self.host.now_s, *(stream.free_at_s for stream in self._streams))

    @property
    def offload_s(self) -> float:
        """Time of the engine's copies to the host so far, without their waits."""
        assert isinstance(self.d2h, VirtualStream)
        return self.d2h.busy_s

    def new_stream(self, name: str = "") -> VirtualStream:
        """Make another stream, unordered with others. Its name is not used."""
        self._streams.append(VirtualStream(self.host))
        return self._streams[-1]

    def timed_event(self, stream: Stream) -> VirtualEvent:
        return stream.record_event()  # type: ignore[return-value]

    def memory_bytes(self) -> int:
        return self.hardware.memory_bytes

    def allocated(self) -> Allocated:
        return Allocated(self.memory.live_bytes, self.memory.peak_bytes)

    def copy(
        self, stream: Stream, targets: list[Tensor], sources: list[Tensor], label: str
    ) -> None:
        """Take the time of the copies, one after the other."""
        assert isinstance(stream, VirtualStream)
        for target in targets:
            copy = partial(self.link.copy, nbytes=target.nbytes, to_host=stream is self.d2h)
            stream.launch_until(copy)

    def allocate_host(self, nbytes: int) -> Tensor:
        """Allocate addresses without memory behind them, in the time that pinning takes."""
        self.pin(nbytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        try:
            return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)
        except (OSError, OverflowError) as failure:
            raise MemoryError(f"no addresses for {nbytes} bytes: {failure}") from failure

    def pin(self, nbytes: int) -> None:
        """Take the host's time of pinning."""
        if self.hardware.pin_bytes_per_s is not None:
            self.host.now_s += nbytes / self.hardware.pin_bytes_per_s

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Give operators on ``meta`` time and memory, with the kernels of an accelerator.

        Raises:
            RuntimeError: Another virtual device is active.
        """
        with accelerator_kernels(), _Clocked(self):
            yield

    def synchronize(self) -> None:
        self.host.wait_until(self.seconds)


class _Clocked(TorchDispatchMode):
    """Dispatch mode that gives each operator below autograd its time, in forward and backward."""

    def __init__(self, device: VirtualBackend) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # in which operators arrive as the program wrote them
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if func in PROGRAM_COPIES and (copy := self._copied(func, args, kwargs)) is not None:
            return copy
        schema, device = operator(func), self._device
        takes_time = not (schema.is_view or schema.is_allocation)
        try:
            if takes_time:
                outputs, seconds = device.costs.run(func, args, kwargs)
            else:
                outputs, seconds = func(*args, **kwargs), 0.0
        except RuntimeError as failure:
            if not schema.may_depend_on_data:
                raise
            raise RuntimeError(
                f"what {schema.label} returns depends on data, and a virtual device has none; "
                "expected operators whose sizes and results follow from those of their arguments: "
                "leave the mask out, give every expert as many tokens, or compute it on the CPU"
            ) from failure
        operands = [value for value, _ in schema.operands(args, kwargs)]
        touched = [tensor for tensor in tensors_in((operands, outputs)) if tensor.is_meta]
        for tensor in touched:
            if has_storage(tensor):
                device.memory.see(tensor.untyped_storage())
        if touched and takes_time:
            live = device.current_stream()
            live.launch_until(partial(device.link.compute, seconds=seconds))
            if device.is_blocking:
                live.synchronize()
        return outputs

    def _copied(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Run a copy of the program's own, as by ``x.cpu()``; None if it crosses no link."""
        device, is_waited_for = self._device, not kwargs.get("non_blocking", False)
        if func is aten.copy_.default:
            output, source = args[:2]
            to_device = output.is_meta
            is_waited_for = is_waited_for and not (len(args) > 2 and args[2])
        else:
            source = args[0]
            to_device = (kwargs.get("device") or source.device).type == "meta"
        if to_device == source.is_meta:
            return None
        if func is aten._to_copy.default:
            output = func(source, **{**kwargs, "device": device.device})
            if not to_device:  # memory of the host that is never touched
                output = torch.empty_like(output, device="cpu")
        if to_device:
            device.memory.see(output.untyped_storage())
        live = device.current_stream()
        copy = partial(device.link.copy, nbytes=source.nbytes, to_host=not to_device)
        live.launch_until(copy)
        if is_waited_for:
            live.synchronize()
        return output  # type: ignore[no-any-return]


# Operators that may go from host to device or back.
PROGRAM_COPIES = (aten._to_copy.default, aten.copy_.default)
ROUNDING_BYTES = 512  # multiple to which device allocators round sizes up


def rounded(nbytes: int) -> int:
    """Return the bytes that a device allocator takes for ``nbytes``."""
    return -(-nbytes // ROUNDING_BYTES) * ROUNDING_BYTES


class Allocation(weakref.ref[UntypedStorage]):
    """A storage, held weakly, with its size, and its number in the order of allocation."""

    __slots__ = ("key", "nbytes", "number")
    key: int
    nbytes: int
    number: int


class DeviceMemory:
    """Count of the bytes of living storages that were seen, and of ``taken_bytes``.

    ``note`` is called with the number of a storage and its additional bytes when it is first seen,
    is resized and dies.
    """

    def __init__(
        self, taken_bytes: int = 0, note: Callable[[int, int], object] | None = None
    ) -> None:
        self._live_bytes = self._peak_bytes = taken_bytes
        self._note, self._numbers = note, count()
        self._alive: dict[int, Allocation] = {}
        self._gone: deque[Allocation] = deque()  # a weak reference's callback may only append

    @property
    def live_bytes(self) -> int:
        """Bytes of the storages alive."""
        self._free_gone()
        return self._live_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at a time."""
        self._free_gone()
        return self._peak_bytes

    def take_peak(self) -> int:
        """Return the peak since the last call, or since the beginning."""
        self._free_gone()
        peak, self._peak_bytes = self._peak_bytes, self._live_bytes
        return peak

    def see(self, storage: UntypedStorage) -> Allocation:
        """Count a storage on the device, unless it is counted with the same size."""
        self._free_gone()
        key, nbytes = storage._cdata, rounded(storage.nbytes())
        allocation = self._alive.get(key)
        if allocation is None or allocation() is not storage:
            allocation = self._alive[key] = Allocation(storage, self.dies)
            allocation.key, allocation.nbytes, allocation.number = key, 0, next(self._numbers)
        if more_bytes := nbytes - allocation.nbytes:  # it is new, or was resized
            self._live_bytes += more_bytes
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)
            if self._note is not None:
                self._note(allocation.number, more_bytes)
            allocation.nbytes = nbytes
        return allocation

    def dies(self, allocation: Allocation) -> None:
        """Free the memory of a dead storage, when bytes are next read."""
        if self._note is not None:
            self._note(allocation.number, -allocation.nbytes)
        self._gone.append(allocation)

    def _free_gone(self) -> None:
        while self._gone:
            allocation = self._gone.popleft()
            self._live_bytes -= allocation.nbytes
            if self._alive.get(allocation.key) is allocation:
                del self._alive[allocation.key]
