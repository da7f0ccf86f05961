"""What the tests on the emulated device share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def compute() -> torch.Stream:
    """The current stream."""
    return torch.accelerator.current_stream()


@contextmanager
def late(emulated: ModuleType, stream: torch.Stream, work: Callable[[], object]) -> Iterator[Any]:
    """``work`` is queued on ``stream``, and not done before its gate is released or this is left.

    A list from which ``work`` takes what it uses lets the caller let go of that.
    """
    compute().synchronize()
    with emulated.hold(stream) as gate:
        with stream:
            work()
        yield gate
    stream.synchronize()


def some(n: int) -> Tensor:
    """Other numbers each time, so that what is left of an earlier test is never right."""
    return torch.randn(n)
