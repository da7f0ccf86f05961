"""Layers on the host under autocast: what stays on the device, as docs/offload-layers.md has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import on_two_backends
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pp_offload import offload_layers
from pp_offload.backends import Backend

WIDTH, DEPTH = 16, 4

Call = Callable[[nn.Module, Tensor], Tensor]


def direct(layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    return y


def checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(layer, x, use_reentrant=False)
    return y


class Twice(nn.Linear):
    """Uses its weight twice."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(torch.tanh(super().forward(x))))


class Stack(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Twice() for _ in range(DEPTH))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x


def stack(call: Call = direct) -> Stack:
    torch.manual_seed(1)
    return Stack(call)


def inputs(backend: Backend, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2))
    return x.to(backend.device, dtype).requires_grad_()


@on_two_backends
@pytest.mark.parametrize(
    "call, dtype, num_casts",
    [
        (direct, torch.float32, 2 * DEPTH),
        (checkpointed, torch.float32, 0),
        (direct, torch.bfloat16, 0),
    ],
)
def test_casts_of_weights_stay_until_backward(
    backend: Backend, call: Call, dtype: torch.dtype, num_casts: int
) -> None:
    """Unless the layers are checkpointed, or there is nothing to cast."""
    casts: dict[int, Any] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.shape == (WIDTH, WIDTH):
            casts[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with backend.activate():
        model = stack(call).to(dtype)
        offload_layers(model, "layers", backend=backend)
        with (
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
            torch.autocast(backend.device.type, torch.bfloat16),
        ):
            y = model(inputs(backend, dtype))
        assert len(casts) == num_casts
        y.sum().backward()
