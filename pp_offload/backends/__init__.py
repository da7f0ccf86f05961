"""Backends: streams, events and copies of a device."""

from __future__ import annotations

import torch

from pp_offload._common.checks import brief
from pp_offload.backends.accelerator import AcceleratorBackend as AcceleratorBackend
from pp_offload.backends.base import Allocated as Allocated
from pp_offload.backends.base import Backend as Backend
from pp_offload.backends.base import Event as Event
from pp_offload.backends.base import Stream as Stream
from pp_offload.backends.base import TimedEvent as TimedEvent
from pp_offload.backends.base import captured as captured
from pp_offload.backends.base import those_captured as those_captured
from pp_offload.backends.cpu import CpuBackend as CpuBackend
from pp_offload.backends.cpu import HostTimed as HostTimed
from pp_offload.backends.cpu import timed_by_host as timed_by_host


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
    return CpuBackend() if is_host else AcceleratorBackend(device)
