"""What the counters of a trace say at one time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from pp_offload._transfer.engine import TransferEngine
from pp_offload.backends import Backend
from pp_offload.trace.events import DEVICE, HOST, IN_FLIGHT, RELOADED

logger = logging.getLogger(__name__)

ALLOCATED = "allocated_bytes.all"
"""As torch calls it."""


class Counters:
    """Reads counters; nothing is let go of or waited for, as ``statistics()`` would.

    Args:
        transfer: The engine.
    """

    def __init__(self, transfer: TransferEngine) -> None:
        self._transfer = transfer
        self._device_bytes = device_bytes(transfer.backend)
        self._least_peak = 0

    def read(self) -> dict[str, int]:
        """Bytes by counter, as the host knows them now. Takes the lock for a moment."""
        transfer = self._transfer
        with transfer.lock:
            found = {
                HOST: sum([tier.host_bytes_in_use() for tier in transfer.tiers]),
                IN_FLIGHT: transfer.copies.in_flight.nbytes,
                RELOADED: transfer.reloads.nbytes,
            }
        if self._device_bytes is not None:
            found[DEVICE], peak = self._device_bytes()
            self._least_peak = min(self._least_peak, peak)
        return found

    def step_peak(self) -> int | None:
        """The most that was allocated since this was last called; None where nobody knows.

        A device tells its peak since that was last reset, which others do. It is this step's where
        it has risen since any of the times at which counters were read.
        """
        if self._device_bytes is None:
            return None
        least, (_, self._least_peak) = self._least_peak, self._device_bytes()
        return self._least_peak if self._least_peak > least else None


def device_bytes(backend: Backend) -> Callable[[], tuple[int, int]] | None:
    """Says how much device memory is allocated, and the peak of that; None where nobody knows."""
    memory: Any = getattr(backend, "memory", None)
    if hasattr(memory, "live_bytes"):  # of a virtual device
        return lambda: (int(memory.live_bytes), int(memory.peak_bytes))
    if backend.is_host or backend.device.type in ("cpu", "meta"):
        return None  # the device's memory is the host's, which others use, too
    device = backend.device
    try:
        torch.accelerator.memory_stats(device)
    except (RuntimeError, NotImplementedError, AssertionError) as failure:
        logger.debug("%s does not say what is allocated: %s", backend.name, failure)
        return None

    def allocated() -> tuple[int, int]:
        found = torch.accelerator.memory_stats(device)  # once, for it is slow
        return int(found.get(f"{ALLOCATED}.current", 0)), int(found.get(f"{ALLOCATED}.peak", 0))

    return allocated
