"""Any accelerator PyTorch knows: CUDA, ROCm, XPU, or a PrivateUse1 device.

Only the device-agnostic API is used: ``torch.accelerator``, ``torch.Stream`` and ``torch.Event``,
which satisfy the protocols of :mod:`pp_offload.backends.base` as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from operator import methodcaller
from typing import Any, cast

import torch
from torch import Tensor

from pp_offload._common.checks import check_kind
from pp_offload._common.processes import logger_of
from pp_offload._common.torch_private import (
    accelerator_device,
    accelerator_stats,
    accelerator_stream,
    set_accelerator_device,
    set_accelerator_stream,
)
from pp_offload.backends.base import Allocated, Backend, Stream, TimedEvent, no_memory_in_captures

logger = logger_of(__name__)


class AcceleratorBackend(Backend):
    """An accelerator device, with one stream for each copy direction.

    Streams and events are the device's own, and asking for the live stream, or whether a graph is
    captured, runs no Python code of ours. Both are asked for each saved tensor.

    Args:
        device: None, or a device without a number such as ``torch.device("cuda")``, is the current
            device of the accelerator.

    Raises:
        ValueError: The device is of another kind than the accelerator here, or there is none.
    """

    current_stream: Callable[[], Stream]
    """The live stream of the calling thread; inside backward, that of the running node."""

    def __init__(self, device: torch.device | None = None) -> None:
        if device is not None:
            check_kind("device", device, torch.device, "a torch.device", "write torch.device(...)")
        self.device = _with_number(device)
        if self.device.type == "cuda" and torch.version.cuda is not None:  # ROCm has other names
            _warn_of_one_queue()
        self.name, self.is_host = str(self.device), False
        # By index: a tenth of the time that asking by device takes.
        self.current_stream = cast(Any, partial(accelerator_stream, self.device.index))
        self.d2h = cast(Stream, torch.Stream(device=self.device))
        self.h2d = cast(Stream, torch.Stream(device=self.device))
        module = torch.get_device_module(self.device)
        # For a device without graphs, bool: bool() is False.
        self._ask: Callable[[], bool] = getattr(module, "is_current_stream_capturing", bool)
        self._capture = 0
        self._capturing: Stream | None = None  # stream where the running capture was first seen

    is_capturing = property(methodcaller("_ask"))
    """Whether work queued now becomes part of a graph instead of being run."""

    def capture_id(self) -> int:
        """Return the number of the running capture; 0 outside. Two captures have the same number if
        this was not called in between, unless the first was joined.
        """
        if self.is_capturing:
            if self._capturing is None:
                self._capturing = self.current_stream()
                self._capture += 1
            return self._capture
        # A capture may run on another thread or stream, and the current stream be no part of it.
        if self._capturing is not None and not self.captures_on(self._capturing):
            self._capturing = None
        return 0

    def captures_on(self, stream: Stream) -> bool:
        """Whether a stream, which need not be the current one, is part of a capture."""
        before, device = self.current_stream(), accelerator_device()
        try:
            set_accelerator_stream(stream)
            return self._ask()
        finally:
            set_accelerator_stream(before)
            set_accelerator_device(device)

    def joined(self) -> None:
        """Give the next capture another number: this one may have ended."""
        self._capturing = None

    def timed_event(self, stream: Stream) -> TimedEvent:
        event = torch.Event(device=self.device, enable_timing=True)
        event.record(cast(torch.Stream, stream))
        return cast(TimedEvent, event)

    def memory_bytes(self) -> int | None:
        """Return bytes that the driver has free, within this process's share, and that PyTorch's
        allocator holds, less the gaps that it had between tensors.
        """
        module = torch.get_device_module(self.device)
        if not hasattr(module, "mem_get_info"):
            return None
        nbytes, total = module.mem_get_info(self.device)
        stats = self._stats()
        nbytes += _of(stats, "reserved_bytes", "current")
        if hasattr(module, "get_per_process_memory_fraction"):
            nbytes = min(nbytes, int(total * module.get_per_process_memory_fraction(self.device)))
        return max(0, int(nbytes - _of(stats, "inactive_split_bytes", "peak")))

    def allocated(self) -> Allocated | None:
        """Return bytes of PyTorch's allocator; None if the device has no statistics."""
        stats = self._stats()
        if not stats:
            return None
        return Allocated(
            _of(stats, "allocated_bytes", "current"),
            _of(stats, "allocated_bytes", "peak"),
            _of(stats, "reserved_bytes", "current"),
            stats.get("num_alloc_retries", 0),
        )

    def _stats(self) -> dict[str, Any]:
        try:
            return accelerator_stats(self.device.index)
        except RuntimeError:
            return {}

    def copy(
        self, stream: Stream, targets: list[Tensor], sources: list[Tensor], label: str
    ) -> None:
        """Queue the copies; host memory must be pinned for them to be asynchronous."""
        # Not ``with stream``: the stream object stores the previous stream, so two threads inside
        # at once would restore each other's.
        before, device = self.current_stream(), accelerator_device()
        try:  # also around this call, behind which an interrupt may come
            set_accelerator_stream(stream)  # makes its device the current one, too
            with torch.no_grad():
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)
        finally:
            set_accelerator_stream(before)
            set_accelerator_device(device)  # the program's, which may be another

    def allocate_host(self, nbytes: int) -> Tensor:
        """Return pinned memory; a capture can only use memory that was pinned before it."""
        if self.is_capturing:
            raise no_memory_in_captures(nbytes)
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as failure:
            raise MemoryError(f"cannot pin {nbytes} bytes of host memory: {failure}") from failure

    def trim_host(self) -> None:
        """Empty PyTorch's cache of pinned blocks, where it has a function for that."""
        empty_cache = getattr(torch.accelerator, "empty_host_cache", None)
        if empty_cache is not None:
            empty_cache()

    def synchronize(self) -> None:
        """Block until both copy streams are empty; in a capture nothing runs."""
        if not self.is_capturing:
            super().synchronize()


@cache
def _warn_of_one_queue() -> None:
    """Warn, once, if all copies share a work queue, as where Megatron has one for kernels.

    Source: CUDA programming guide, environment variables.
    """
    names = "CUDA_DEVICE_MAX_COPY_CONNECTIONS", "CUDA_DEVICE_MAX_CONNECTIONS"
    name = next((name for name in names if name in os.environ), "")
    if os.environ.get(name) == "1":
        logger.warning(
            "%s=1 gives copies one work queue, where they can wait for each other "
            "and for kernels that they do not need; start the process with "
            "CUDA_DEVICE_MAX_COPY_CONNECTIONS=8, which leaves the queue of kernels as it is",
            name,
        )


def _with_number(device: torch.device | None) -> torch.device:
    """Return the device with its number: a tensor's device has one, and equals no other."""
    # A torch built for CUDA names it as the accelerator also where there is no GPU.
    is_here = torch.accelerator.is_available()
    accelerator = torch.accelerator.current_accelerator() if is_here else None
    if accelerator is None:
        given = "" if device is None else f"device is {device}, and "
        raise ValueError(
            f"{given}torch {torch.__version__} finds no accelerator, expected one that "
            'torch.accelerator.is_available() sees; pass device="cpu" or backend=CpuBackend(), or '
            "install its driver and a torch built for it"
        )
    if device is not None and device.type != accelerator.type:
        raise ValueError(
            f"device is {device}, expected {accelerator.type}, which is the accelerator here; use "
            "CpuBackend() for tensors of the host"
        )
    if device is not None and device.index is not None:
        return device
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _of(stats: dict[str, Any], name: str, kind: str) -> int:
    return int(stats.get(name, {}).get("all", {}).get(kind, 0))
