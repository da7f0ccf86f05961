"""Host memory of parameters that wait there: what is saved of one has the bytes of that alone."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from conftest import on_two_backends
from helpers.sliced import Offload, both_ways, trained
from helpers.toy import same_bits
from torch import Tensor, nn

from pp_offload.backends import Backend

WIDTH = 128
BASE = WIDTH * WIDTH * 4
"""Bytes of a layer's frozen weight."""


class Adapted(nn.Module):
    """A small adapter beside a large frozen weight; some is empty, of two bytes, or transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, 4, bias=False)
        self.spread = nn.Parameter(torch.randn(3, WIDTH).t())
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.shift = nn.Parameter(torch.randn(5).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        x = self.base(x) + self.adapter(x).mean() + (x @ self.spread).mean()
        return x + self.shift.float().sum() + self.empty.sum()


def stack() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [Adapted() for _ in range(3)]
    layers[2].base.weight = layers[0].base.weight
    return nn.Sequential(*layers)


def adapters(model: nn.Module) -> dict[str, Tensor]:
    """What is saved of adapters on a frozen base."""
    return {name: tensor for name, tensor in model.state_dict().items() if "base" not in name}


def saved(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(adapters(model), file)
    return file.getvalue()


@on_two_backends
@both_ways
@pytest.mark.parametrize("when", ["at first", "after steps", "of a copy"])
def test_a_file_has_what_is_saved_alone(backend: Backend, offload: Offload, when: str) -> None:
    with backend.activate():
        model, _ = offload(stack(), backend)
        if when == "after steps":
            trained(model, backend, WIDTH)
        if when == "of a copy":
            model = copy.deepcopy(model)
        file = saved(model)
        assert abs(len(file) - len(saved(stack()))) < BASE / 8
        loaded = torch.load(io.BytesIO(file), map_location="cpu")
        assert same_bits(list(loaded.values()), list(adapters(model).values()))
