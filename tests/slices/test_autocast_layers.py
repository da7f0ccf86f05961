"""Layers on the host under autocast: what stays on the device, as docs/offload-layers.md has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import on_two_backends
from helpers.sliced import WIDTH, input_for
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pp_offload import offload_layers
from pp_offload.backends import Backend

DEPTH = 4


class Stack(nn.Module):
    """Each layer uses its weight twice."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]
        self.layers = nn.ModuleList(nn.Sequential(one, nn.Tanh(), one) for one in layers)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return x


@on_two_backends
@pytest.mark.parametrize(
    ("is_checkpointed", "dtype", "num_casts"),
    [(False, torch.float32, 2 * DEPTH), (True, torch.float32, 0), (False, torch.bfloat16, 0)],
)
def test_casts_of_weights_stay_until_backward(
    backend: Backend, is_checkpointed: bool, dtype: torch.dtype, num_casts: int
) -> None:
    """Unless the layers are checkpointed, or there is nothing to cast."""
    casts: dict[int, Any] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.shape == (WIDTH, WIDTH):
            casts[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with backend.activate():
        model = Stack(is_checkpointed).to(dtype)
        offload_layers(model, "layers", backend=backend)
        with (
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
            torch.autocast(backend.device.type, torch.bfloat16),
        ):
            y = model(input_for(backend).to(dtype))
        assert len(casts) == num_casts
        y.sum().backward()
