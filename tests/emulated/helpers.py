"""What the tests on the emulated device share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor

DELAYS: dict[str, dict[str, int]] = {
    "none": {},
    "late compute": {"kernel_us": 300},
    "late d2h": {"d2h_us": 2000},
    "late h2d": {"h2d_us": 2000},
    "late copies": {"d2h_us": 1500, "h2d_us": 1500},
    "by chance": {"kernel_us": 50, "jitter_us": 1500, "seed": 3},
}
WAIT_S = 0.1
"""Work that waits for nothing is done by then."""


def compute() -> torch.Stream:
    """The current stream."""
    return torch.accelerator.current_stream()


@contextmanager
def late(emulated: ModuleType, stream: torch.Stream, *others: torch.Stream) -> Iterator[None]:
    """A gate that holds ``stream`` back until ``others`` have done all that they can without it.

    Where a wait is missing, the others are through before the gate opens, and the bytes are wrong.
    """
    emulated.synchronize()
    with emulated.hold(stream):
        yield
        end = time.monotonic() + WAIT_S
        while not all(other.query() for other in others) and time.monotonic() < end:
            time.sleep(0.001)
    emulated.synchronize()


def some(n: int) -> Tensor:
    """Other numbers each time, so that what an earlier test wrote is never right."""
    return torch.randn(n)
