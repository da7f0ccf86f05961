"""``offload_layers`` in compiled code: layers run as they are, and the bits are those without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import make_backend
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


def leave(model: Model) -> None:
    """Not compiled at this time."""


@pytest.mark.quick("cpu")
@pytest.mark.parametrize("name", ["cpu", "late"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (compile_model, leave),
        (leave, compile_model),
        (compile_layers, leave),
        (leave, compile_layers),
    ],
    ids=["model before", "model after", "layers before", "layers after"],
)
def test_compiled_before_or_after(
    name: str, before: Callable[[Model], None], after: Callable[[Model], None]
) -> None:
    torch.compiler.reset()
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    backend = make_backend(name)
    before(model)
    with offload_layers(model, "layers", backend=backend) as offloaded, backend.activate():
        after(model)
        for rows in (2, 3, 5):
            found, expected = model(torch.ones(rows, 8)), plain(torch.ones(rows, 8))
            assert torch.equal(found, expected)
            found.sum().backward()
            expected.sum().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            assert torch.equal(one.grad, other.grad)
        assert offloaded.statistics().bytes_reloaded > 0
