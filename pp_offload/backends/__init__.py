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


def default_backend() -> Backend:
    """The accelerator where there is one, else the CPU."""
    if not torch.accelerator.is_available():
        return CpuBackend()
    accelerator = AcceleratorBackend()
    return GraphSafeBackend(accelerator) if accelerator.has_graphs else accelerator
