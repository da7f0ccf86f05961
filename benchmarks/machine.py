"""What a device is, how fast its link is, and what it tells of its memory.

d2h, h2d = machine.ceiling_bytes_per_s(device)
machine.reset_peak(device)
allocated, reserved = machine.peak_bytes(device)
"""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path

import torch

from pp_offload.cli.doctor import DeviceSpeed

DEVICES = ("cpu", "cuda", "xpu", "emulated")


def device_of(name: str) -> torch.device:
    """The device of that name; the accelerator that the tests have, in a checkout, is loaded."""
    if name == "emulated":
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
        import emulated

        emulated.load()
    return torch.device(name, None if name == "cpu" else 0)


def facts(device: torch.device) -> dict[str, str]:
    name = platform.processor() or platform.machine()
    if device.type != "cpu":
        name = getattr(torch.get_device_module(device), "get_device_name", str)(device)
    return {
        "device": f"{device} ({name})",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def reset_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()


def peak_bytes(device: torch.device) -> tuple[int | None, int | None]:
    """Allocated and reserved, since the last reset; None on the CPU."""
    if device.type == "cpu":
        return None, None
    return torch.accelerator.max_memory_allocated(), torch.accelerator.max_memory_reserved()


def empty_cache(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def ceiling_bytes_per_s(device: torch.device, nbytes: int = 2**28) -> list[float]:
    """To the host and to the device, both at once, each on its stream, in the best of some runs.

    On the CPU both are one plain copy at a time.
    """
    pinned = device.type != "cpu"
    hosts = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    devices = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    pairs = [(hosts[0], devices[0]), (devices[1], hosts[1])]
    return DeviceSpeed(device, nbytes).copy_rates(pairs)
