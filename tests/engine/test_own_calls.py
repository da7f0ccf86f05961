"""How many functions of the package a group calls, on a device that answers as CUDA does.

Counted from opening a group to the last tensor that its backward takes, by a profiler. Calls of
PyTorch are not counted, nor calls of C functions.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lines import Line
from torch import Tensor

import pp_offload
from pp_offload.backends import AcceleratorBackend, accelerator

OWN = str(Path(pp_offload.__file__).parent)
SHAPE = 2, 512


class LateEvent:
    """Has passed when it is asked for the second time."""

    def __init__(self) -> None:
        self._is_asked = False

    def query(self) -> bool:
        was_asked, self._is_asked = self._is_asked, True
        return was_asked

    def synchronize(self) -> None:
        """It has passed."""


class AnyStream:
    """Takes everything."""

    def wait_event(self, event: LateEvent) -> None:
        """Nothing runs."""

    def record_event(self) -> LateEvent:
        return LateEvent()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> AcceleratorBackend:
    """An accelerator's backend, on which the host's memory is the device's."""
    live = AnyStream()
    functions = {
        "accelerator_stream": lambda index: live,
        "set_accelerator_stream": lambda stream: None,
        "accelerator_device": lambda: 0,
        "set_accelerator_device": lambda index: None,
    }
    for name, function in functions.items():
        monkeypatch.setattr(accelerator, name, function)
    backend: Any = AcceleratorBackend(torch.device("cpu", 0))
    backend.device = torch.device("cpu")
    backend.d2h, backend.h2d = AnyStream(), AnyStream()
    backend.allocate_host = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)
    return backend  # type: ignore[no-any-return]


def calls(line: Line, num_groups: int, num_tensors: int) -> Counter[str]:
    """Of one step, by function."""
    found = Counter[str]()

    def count(frame: Any, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            found[frame.f_code.co_qualname] += 1

    def forward(x: Tensor) -> Tensor:
        for _ in range(num_tensors):
            x = torch._C._nn.leaky_relu(x, 0.5)  # saves its input
        return x

    for is_counted in (False, False, True):
        line.reset()
        y = torch.ones(SHAPE, requires_grad=True).clone()
        sys.setprofile(count if is_counted else None)
        try:
            with line.chunk():
                for _ in range(num_groups):
                    y = line.group("g", forward, y)
            y.backward(torch.ones(SHAPE))
        finally:
            sys.setprofile(None)
    return found


def per_group(backend: AcceleratorBackend, num_tensors: int) -> float:
    """Calls that one more group makes."""
    line = Line(backend)
    few, many = calls(line, 4, num_tensors), calls(line, 12, num_tensors)
    return (many - few).total() / 8


def test_calls_of_a_group_of_four(backend: AcceleratorBackend) -> None:
    assert per_group(backend, 4) <= MOST_OF_FOUR


def test_calls_of_a_tensor_in_a_large_group(backend: AcceleratorBackend) -> None:
    assert per_group(backend, 100) / 100 <= MOST_OF_A_TENSOR


MOST_OF_FOUR = 67  # six of them look for recipes, and find none
MOST_OF_A_TENSOR = 8
