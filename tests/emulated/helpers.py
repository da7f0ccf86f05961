"""What the tests on the emulated device share."""

from __future__ import annotations

import torch
from torch import Tensor


def compute() -> torch.Stream:
    """The current stream."""
    return torch.accelerator.current_stream()


def some(n: int) -> Tensor:
    """Other numbers each time, so that what is left of an earlier test is never right."""
    return torch.randn(n)
