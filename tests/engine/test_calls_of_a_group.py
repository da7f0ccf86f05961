"""How many functions of the package a group calls, from its start to the end of its backward."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.sessions import begin_step, group, session
from torch import Tensor

import pp_offload

OWN = str(Path(pp_offload.__file__).parent)


def calls(num_groups: int, num_tensors: int) -> int:
    """Of a step, once it is like the one before."""
    num = Counter[str]()

    def count(frame: Any, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            num[frame.f_code.co_qualname] += 1

    def forward(x: Tensor) -> Tensor:
        for _ in range(num_tensors):
            x = torch._C._nn.leaky_relu(x, 0.5)  # saves its input
        return x

    with session("cpu", device_limit_bytes=None, max_in_flight_bytes=2**20):
        for is_counted in (False, False, True):
            y = torch.ones(2, 512, requires_grad=True).clone()
            sys.setprofile(count if is_counted else None)
            try:
                begin_step()
                for number in range(num_groups):
                    y = group(y, forward, name=f"g{number % 2}")
                y.backward(torch.ones(2, 512))
            finally:
                sys.setprofile(None)
    return num.total()


@pytest.mark.parametrize(("num_tensors", "most"), [(4, 140), (100, 1400)])
def test_one_more_group_calls_few_functions(num_tensors: int, most: int) -> None:
    assert (calls(12, num_tensors) - calls(4, num_tensors)) / 8 <= most
