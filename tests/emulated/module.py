"""``torch.emulated``: what PyTorch asks of a device's module, and what tests set and ask."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, accelerator

MEMORY_BYTES = 2**30
"""Of the device, which does not enforce it: more than any test takes."""

native: Any = None
"""What was compiled; set by ``load()``."""

_PROCESS = os.getpid()

# What PyTorch has for any device

current_device = accelerator.current_device_index
set_device = accelerator.set_device_index
current_stream = accelerator.current_stream
set_stream = accelerator.set_stream
empty_cache = accelerator.empty_cache
memory_allocated = accelerator.memory_allocated
max_memory_allocated = accelerator.max_memory_allocated
memory_reserved = accelerator.memory_reserved
max_memory_reserved = accelerator.max_memory_reserved
reset_peak_memory_stats = accelerator.reset_peak_memory_stats


def mem_get_info(device: object = None) -> tuple[int, int]:
    return MEMORY_BYTES - memory_reserved(device), MEMORY_BYTES  # type: ignore[arg-type]


def device(device: int | torch.device) -> accelerator.device_index:
    """``with torch.emulated.device(1):``; the current device of this thread."""
    return accelerator.device_index(device if isinstance(device, int) else device.index)


# What it asks of this one


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return native.device_count()


def _is_in_bad_fork() -> bool:
    """The threads of streams do not follow a fork."""
    return os.getpid() != _PROCESS


def _lazy_init() -> None:
    """Nothing is lazy."""


def is_current_stream_capturing() -> bool:
    """There are no graphs; asking for them is what CUDA's path does."""
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def manual_seed(seed: int) -> None:
    """The generator of the CPU is the generator of this device."""
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(device: object = None) -> Tensor:
    return torch.default_generator.get_state()


def set_rng_state(new_state: Tensor, device: object = None) -> None:
    torch.default_generator.set_state(new_state)


# For tests


def synchronize(device: object = None) -> None:
    """Wait for all streams."""
    native.synchronize()


def set_delays(
    kernel_us: int = 0, h2d_us: int = 0, d2h_us: int = 0, jitter_us: int = 0, seed: int = 0
) -> None:
    """Make work late: each kernel or copy that starts from now on first sleeps so long, and up to
    ``jitter_us`` longer, which each stream draws from a generator of its own with this seed.
    """
    native.set_delays(kernel_us, h2d_us, d2h_us, jitter_us, seed)


def hold(stream: torch.Stream):  # noqa: ANN201 - a class that is compiled
    """Stop a stream here until ``release()``; also when the gate is left, or dropped."""
    return native.hold(stream.stream_id)
