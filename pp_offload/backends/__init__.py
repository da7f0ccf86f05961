"""How bytes move on this device: streams, events and copies."""

from __future__ import annotations

import torch

from pp_offload.backends.accelerator import AcceleratorBackend
from pp_offload.backends.base import Backend, Event, Stream
from pp_offload.backends.cpu import CpuBackend
from pp_offload.backends.graph_safe import GraphSafeBackend, bare

__all__ = [
    "AcceleratorBackend",
    "Backend",
    "CpuBackend",
    "Event",
    "GraphSafeBackend",
    "Stream",
    "bare",
    "default_backend",
]


def default_backend(device: torch.device | None = None) -> Backend:
    """That of a device; without one, the accelerator where there is one, else the CPU."""
    is_host = device.type == "cpu" if device is not None else not torch.accelerator.is_available()
    if is_host:
        return CpuBackend()
    accelerator = AcceleratorBackend(device)
    return GraphSafeBackend(accelerator) if accelerator.has_graphs else accelerator
