"""``offload_layers`` in compiled code: layers run as they are, and the bits are those without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import make_backend
from helpers.sliced import state
from helpers.toy import same_bits
from torch import Tensor, nn

from pp_offload import offload_layers


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def compile_layers(model: Model) -> None:
    for layer in model.layers:
        layer.compile(backend="eager")


def compile_model(model: Model) -> None:
    model.compile(backend="eager")


@pytest.mark.quick("cpu")
@pytest.mark.parametrize("name", ["cpu", "late"])
@pytest.mark.parametrize("compiles", [compile_model, compile_layers])
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_before_or_after(name: str, compiles: Callable[[Model], None], when: str) -> None:
    torch.compiler.reset()
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    backend = make_backend(name)
    if when == "before":
        compiles(model)
    with offload_layers(model, "layers", backend=backend) as offloaded, backend.activate():
        if when == "after":
            compiles(model)
        for rows in (2, 3, 5):
            outputs = [module(torch.ones(rows, 8)) for module in (model, plain)]
            for output in outputs:
                output.sum().backward()
            assert same_bits(outputs[:1], outputs[1:]) and same_bits(state(model), state(plain))
        assert offloaded.statistics().bytes_reloaded > 0
