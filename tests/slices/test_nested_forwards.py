"""Forwards inside of others: what comes ahead in them, and what an interrupt leaves to the next."""

from __future__ import annotations

import pytest
import torch
from helpers.toy import moved, same_bits
from torch import Tensor, nn

from pp_offload import offload_layers
from pp_offload.testing import SimulatedBackend

WIDTH, DEPTH = 8, 3


class Inner(nn.Module):
    """Has the layers; is interrupted behind one of them, if it is to be."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth))
        self.interrupted_behind: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == self.interrupted_behind:
                raise KeyboardInterrupt
        return x


class Outer(nn.Module):
    """Calls such modules one after another, as a decoder comes behind an encoder."""

    def __init__(self, *depths: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(map(Inner, depths))
        self.is_interrupted = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = layer(x)
        if self.is_interrupted:
            raise KeyboardInterrupt
        return x


def pair(backend: SimulatedBackend, *depths: int) -> tuple[Outer, Outer]:
    torch.manual_seed(2)
    model, plain = Outer(*depths), Outer(*depths)
    plain.load_state_dict(model.state_dict())
    return model, moved(plain, backend.device)


@pytest.mark.parametrize("depth", [1, DEPTH])
@pytest.mark.parametrize("where", ["between layers", "behind them"])
def test_an_interrupt_outside_of_layers_leaves_nothing_to_another_forward(
    where: str, depth: int
) -> None:
    """The next one looks as if it were inside of that which never ended, and weights were written
    meanwhile in a way that leaves no trace.
    """
    backend = SimulatedBackend("late")
    x = torch.randn(2, WIDTH).to(backend.device)
    with backend.activate(), torch.no_grad():
        model, plain = pair(backend, depth)
        offload_layers(model, "inner.0.layers", backend=backend, num_resident=min(2, depth))
        if where == "between layers":
            model.inner[0].interrupted_behind = 0
        model.is_interrupted = True
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model.inner[0].interrupted_behind = None
        backend.synchronize()  # else the write and a copy that is under way are a race
        for step in (2, 3):
            for module in (model, plain):
                for parameter in module.parameters():
                    parameter.data.mul_(step)
            assert same_bits([model.inner[0](x)], [plain.inner[0](x)])
    backend.check()
