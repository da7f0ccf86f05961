"""How bytes move on this device: streams, events and copies."""

from __future__ import annotations

import torch

from pp_offload.backends.accelerator import AcceleratorBackend
from pp_offload.backends.base import Backend, Event, Stream
from pp_offload.backends.cpu import CpuBackend

__all__ = ["AcceleratorBackend", "Backend", "CpuBackend", "Event", "Stream", "default_backend"]


def default_backend() -> Backend:
    """The accelerator where there is one, else the CPU."""
    return AcceleratorBackend() if torch.accelerator.is_available() else CpuBackend()
