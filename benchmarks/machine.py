"""What a device is, how fast its link is, and what it tells of its memory.

d2h, h2d = ceiling_bytes_per_s(device, nbytes)
reset_peak(device)
allocated, reserved = peak_bytes(device)
"""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from pp_offload.cli.device_speed import DeviceSpeed

MIB = 2**20
DEVICES = ("cpu", "cuda", "xpu", "emulated")


def device_of(name: str) -> torch.device:
    """The device of that name; the accelerator that the tests have, in a checkout, is loaded."""
    if name == "emulated":
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
        import emulated

        emulated.load()
    return torch.device(name, None if name == "cpu" else 0)


def machine(device: torch.device) -> dict[str, str]:
    name = platform.processor() or platform.machine()
    if device.type != "cpu":
        module = torch.get_device_module(device)
        name = module.get_device_name(device) if hasattr(module, "get_device_name") else name
    return {
        "device": f"{device} ({name})",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def memory_api(device: torch.device) -> Any:
    """Where this device tells of its memory, if it does."""
    if device.type == "cpu":
        return None
    if hasattr(torch.accelerator, "max_memory_allocated"):
        return torch.accelerator
    module = torch.get_device_module(device)
    return module if hasattr(module, "max_memory_allocated") else None


def reset_peak(device: torch.device) -> None:
    api = memory_api(device)
    if api is not None:
        api.reset_peak_memory_stats()


def peak_bytes(device: torch.device) -> tuple[int | None, int | None]:
    """Allocated and reserved, since the last reset."""
    api = memory_api(device)
    if api is None:
        return None, None
    return api.max_memory_allocated(), api.max_memory_reserved()


def ceiling_bytes_per_s(device: torch.device, nbytes: int, repeats: int = 8) -> tuple[float, float]:
    """To the host and to the device, both at once, each on its stream, in the best of some runs.

    On the CPU both are one plain copy at a time.
    """
    pinned = device.type != "cpu"
    hosts = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    devices = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    pairs = [(hosts[0], devices[0]), (devices[1], hosts[1])]
    d2h, h2d = DeviceSpeed(device, nbytes).copy_rates(pairs, repeats)
    return d2h, h2d
