"""Host memory of parameters that wait there: what is saved of one has the bytes of that alone."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import on_two_backends
from sliced import state, trained
from torch import Tensor, nn
from toy import moved, same_bits

from pp_offload import OffloadModel, offload_layers
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
    return nn.Sequential(nn.Sequential(*layers))


@pytest.fixture(params=["layers", "model"])
def offload(request: pytest.FixtureRequest) -> Callable[[nn.Module, Backend], Any]:
    """Makes the layers wait on the host, in either way: what is called, and the handle."""

    def as_layers(model: nn.Module, backend: Backend) -> Any:
        return model, offload_layers(model, "0", backend=backend)

    def as_model(model: nn.Module, backend: Backend) -> Any:
        return OffloadModel(model[0], backend.device, num_slices=2, backend=backend), None

    return as_layers if request.param == "layers" else as_model


def adapters(model: nn.Module) -> dict[str, Tensor]:
    """What is saved of adapters on a frozen base."""
    return {name: one for name, one in model.state_dict().items() if "base" not in name}


def values(model: nn.Module) -> list[Tensor]:
    """What is in its state, on the host."""
    return [one.cpu() for one in model.state_dict().values()]


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
@pytest.mark.parametrize("when", ["at first", "after steps", "closed", "of a copy"])
def test_a_file_has_what_is_saved_alone(backend: Backend, offload: Any, when: str) -> None:
    with backend.activate():
        called, handle = offload(stack(), backend)
        if when != "at first":
            trained(called, backend, WIDTH)
        if when == "closed" and handle is not None:
            handle.close()
        if when == "of a copy":
            called = copy.deepcopy(called)
        file = saved(called)
        assert abs(len(file) - len(saved(stack()))) < BASE / 8
        found = torch.load(io.BytesIO(file), map_location="cpu")
        assert same_bits(list(found.values()), list(adapters(called).values()))


@on_two_backends
def test_each_parameter_has_a_storage_of_its_own(backend: Backend, offload: Any) -> None:
    with backend.activate():
        plain = moved(stack(), backend.device)
        called, handle = offload(stack(), backend)
        assert has_storages_apart(called) and same_bits(state(called), state(plain))
        assert same_bits(trained(called, backend, WIDTH), trained(plain, backend, WIDTH))
        assert has_storages_apart(called)
        copied = copy.deepcopy(called)
        assert has_storages_apart(copied) and same_bits(values(copied), values(called))
        before = {name: one.clone() for name, one in called.state_dict().items()}
        trained(called, backend, WIDTH)
        assert same_bits(values(copied), values(plain)), "a copy has memory of its own"
        called.load_state_dict(before)
        if handle is not None:
            handle.close()
            moved(called, backend.device)
        results = [trained(one, backend, WIDTH) for one in (plain, copied, called)]
        assert same_bits(results[1], results[0]) and same_bits(results[2], results[0])


def test_memory_that_is_shared_with_other_processes() -> None:
    backend = SimulatedBackend("late")
    with backend.activate():
        called = OffloadModel(stack()[0], backend.device, num_slices=2, backend=backend)
        called.share_memory()
        assert all(p.is_shared() for p in called.parameters() if p.numel())
        assert same_bits(trained(called, backend, WIDTH), trained(stack(), backend, WIDTH))
    backend.check()
