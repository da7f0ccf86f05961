"""``torch.emulated``: what PyTorch asks of a device's module, and what tests set and ask."""

from __future__ import annotations

import os
from types import ModuleType

import torch
from torch import Tensor

MEMORY_BYTES = 2**30
"""Of the device, which does not enforce it: more than any test takes."""


def make_module(name: str, native: ModuleType) -> ModuleType:
    """The module, around what was compiled."""
    module = ModuleType(name, "An accelerator made of threads.")
    for part in (_Device(native), _Random(), _Memory(), _Controls(native)):
        for key in dir(part):
            if not key.startswith("__") and not key.startswith("_of"):
                setattr(module, key, getattr(part, key))
    module.device = _DeviceContext  # type: ignore[attr-defined]
    module.Gate = native.Gate  # type: ignore[attr-defined]
    return module


class _DeviceContext:
    """``with torch.emulated.device(1):``; the current device of this thread."""

    def __init__(self, device: object) -> None:
        self._index = index_of(device)
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before.append(torch.accelerator.current_device_index())
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *exc_info: object) -> None:
        torch.accelerator.set_device_index(self._before.pop())


def index_of(device: object) -> int:
    """The number of a device; of the current one for None, or where it has none."""
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class _Device:
    def __init__(self, native: ModuleType) -> None:
        self._of_process = os.getpid()
        self._of_native = native

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return self._of_native.device_count()

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: object) -> None:
        torch.accelerator.set_device_index(index_of(device))

    def _is_in_bad_fork(self) -> bool:
        """The threads of streams do not follow a fork."""
        return os.getpid() != self._of_process

    def _lazy_init(self) -> None:
        """Nothing is lazy."""

    def is_current_stream_capturing(self) -> bool:
        """There are no graphs; asking for them is what CUDA's path does."""
        return False

    def current_stream(self, device: object = None) -> torch.Stream:
        return torch.accelerator.current_stream(index_of(device))

    def set_stream(self, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class _Random:
    """The generator of the CPU is the generator of this device."""

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, new_state: Tensor, device: object = None) -> None:
        torch.default_generator.set_state(new_state)


class _Memory:
    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def memory_allocated(self, device: object = None) -> int:
        return torch.accelerator.memory_allocated(index_of(device))

    def max_memory_allocated(self, device: object = None) -> int:
        return torch.accelerator.max_memory_allocated(index_of(device))

    def memory_reserved(self, device: object = None) -> int:
        return torch.accelerator.memory_reserved(index_of(device))

    def max_memory_reserved(self, device: object = None) -> int:
        return torch.accelerator.max_memory_reserved(index_of(device))

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return MEMORY_BYTES - self.memory_reserved(device), MEMORY_BYTES

    def reset_peak_memory_stats(self, device: object = None) -> None:
        torch.accelerator.reset_peak_memory_stats(index_of(device))


class _Controls:
    def __init__(self, native: ModuleType) -> None:
        self._of_native = native

    def synchronize(self, device: object = None) -> None:
        """Wait for all streams."""
        self._of_native.synchronize()

    def set_delays(
        self,
        kernel_us: int = 0,
        h2d_us: int = 0,
        d2h_us: int = 0,
        d2d_us: int = 0,
        jitter_us: int = 0,
        seed: int = 0,
    ) -> None:
        """Make work late: each kernel or copy that starts from now on first sleeps so long.

        Args:
            kernel_us: Before an operator.
            h2d_us: Before a copy from the host.
            d2h_us: Before a copy to the host.
            d2d_us: Before a copy within the device.
            jitter_us: Added to each, 0 to so many.
            seed: Of the jitter; each stream draws from a generator of its own.
        """
        self._of_native.set_delays(kernel_us, h2d_us, d2h_us, d2d_us, jitter_us, seed)

    def hold(self, stream: torch.Stream):  # noqa: ANN201 - a class that is compiled
        """Stop a stream here until ``release()``; also when the gate is left, or dropped."""
        return self._of_native.hold(stream.stream_id)

    def num_queued(self) -> dict[str, int]:
        """Tasks that were queued in this process: kernel, h2d, d2h, d2d."""
        return self._of_native.num_queued()

    def run_at_once(self) -> dict[str, int]:
        """How often each operator drained its stream and ran in the caller."""
        return self._of_native.run_at_once()
