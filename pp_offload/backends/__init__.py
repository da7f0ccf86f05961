"""Backends: streams, events and copies of a device."""

from __future__ import annotations

import torch

from pp_offload._common.checks import brief
from pp_offload.backends.accelerator import AcceleratorBackend
from pp_offload.backends.base import (
    Allocated,
    Backend,
    Event,
    Stream,
    TimedEvent,
    captured,
    those_captured,
)
from pp_offload.backends.cpu import CpuBackend, HostTimed, timed_by_host

__all__ = [
    "AcceleratorBackend",
    "Allocated",
    "Backend",
    "CpuBackend",
    "Event",
    "HostTimed",
    "Stream",
    "TimedEvent",
    "backend_or_default",
    "captured",
    "check_backend",
    "default_backend",
    "those_captured",
    "timed_by_host",
]


def check_backend(backend: object) -> None:
    """Raise a TypeError unless ``backend`` is one, and not its name or its class."""
    # A class has the names as well. Not isinstance of the protocol: that would read properties.
    if isinstance(backend, type) or not hasattr(backend, "current_stream"):
        raise TypeError(
            f"backend is {brief(backend)}, expected a backend, such as CpuBackend(), "
            'AcceleratorBackend() or pp_offload.testing.SimulatedBackend("late")'
        )


def backend_or_default(backend: Backend | None) -> Backend:
    """Return ``backend``, which is checked, or the default backend for None."""
    if backend is None:
        return default_backend()
    check_backend(backend)
    return backend


def default_backend(device: torch.device | None = None) -> Backend:
    """Return the backend of ``device``; for None, of the accelerator if any, else of the CPU."""
    is_host = device.type == "cpu" if device is not None else not torch.accelerator.is_available()
    if is_host:
        return CpuBackend()
    return AcceleratorBackend(device)
