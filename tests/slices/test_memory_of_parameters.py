"""Host memory of parameters that wait there: what is saved of one has the bytes of that alone."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from conftest import on_two_backends
from helpers.sliced import Offload, as_slices, both_ways, state, trained
from helpers.toy import moved, same_bits
from torch import Tensor, nn

from pp_offload.backends import Backend
from pp_offload.testing import SimulatedBackend

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
    return {name: one for name, one in model.state_dict().items() if "base" not in name}


def saved(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(adapters(model), file)
    return file.getvalue()


def has_storages_apart(model: nn.Module) -> bool:
    """Whether each parameter's storage has its bytes and no others."""
    parameters = list(model.parameters())
    storages = [parameter.untyped_storage() for parameter in parameters]
    sizes = [storage.nbytes() for storage in storages]
    is_exact = sizes == [parameter.nbytes for parameter in parameters]
    return is_exact and len({storage._cdata for storage in storages}) == len(parameters)


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


@on_two_backends
@both_ways
def test_each_parameter_has_a_storage_of_its_own(backend: Backend, offload: Offload) -> None:
    with backend.activate():
        plain = moved(stack(), backend.device)
        model, _ = offload(stack(), backend)
        assert has_storages_apart(model) and same_bits(state(model), state(plain))
        copied = copy.deepcopy(model)
        expected = trained(plain, backend, WIDTH)
        for one in (model, copied):
            assert same_bits(trained(one, backend, WIDTH), expected), "a copy has its own memory"
            assert has_storages_apart(one)


def test_memory_that_is_shared_with_other_processes() -> None:
    backend = SimulatedBackend("late")
    with backend.activate():
        model, _ = as_slices(stack(), backend)
        model.share_memory()
        assert all(p.is_shared() for p in model.parameters() if p.numel())
        assert same_bits(trained(model, backend, WIDTH), trained(stack(), backend, WIDTH))
    backend.check()
