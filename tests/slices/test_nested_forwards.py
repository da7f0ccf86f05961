"""An interrupt behind a layer leaves nothing of its forward to the next one."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.toy import moved, same_bits
from torch import Tensor, nn

from pp_offload import offload_layers
from pp_offload.testing import SimulatedBackend

WIDTH = 8


class Inner(nn.Module):
    """Has the layers; is interrupted behind the first of them, if it is to be."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth))
        self.is_interrupted = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.is_interrupted:
                raise KeyboardInterrupt
        return x


class Outer(nn.Module):
    """Is interrupted behind the layers, or between them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = Inner(depth)

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        raise KeyboardInterrupt


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("is_between", [False, True])
def test_an_interrupt_outside_of_layers_leaves_nothing_to_another_forward(
    is_between: bool, depth: int
) -> None:
    """The next one looks as if it were inside of that which never ended, and weights were written
    meanwhile in a way that leaves no trace.
    """
    backend = SimulatedBackend("late")
    x = torch.randn(2, WIDTH).to(backend.device)
    with backend.activate(), torch.no_grad():
        torch.manual_seed(2)
        model = Outer(depth)
        plain = moved(copy.deepcopy(model), backend.device)
        offload_layers(model, "inner.layers", backend=backend, num_resident=min(2, depth))
        model.inner.is_interrupted = is_between
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model.inner.is_interrupted = False
        backend.synchronize()  # else the write and a copy that is under way are a race
        for step in (2, 3):
            for module in (model, plain):
                for parameter in module.parameters():
                    parameter.data.mul_(step)
            assert same_bits([model.inner(x)], [plain.inner(x)])
    backend.check()
