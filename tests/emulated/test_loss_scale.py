"""Gradients on the host and a GradScaler of the device: the numbers of a training on the device."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from pp_offload import OffloadModel, offload_layers

pytestmark = pytest.mark.emulated


def train(how: str, make: Any, *, is_clipped: bool) -> list[Tensor]:
    """Parameters after some steps; the loss of the second one is infinite."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)]
    model: nn.Module = nn.Sequential(*layers)
    if how == "device":
        model.to("emulated")
    elif how == "layers":  # the last one stays on the device
        model = nn.Sequential(nn.Sequential(*layers[:2]), layers[2])
        offload_layers(model, "0", device="emulated")
    else:
        model = OffloadModel(model, "emulated", num_slices=3)
    optimizer = make(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("emulated", init_scale=1024.0)
    x = torch.randn(8, 16).to("emulated")
    for factor in (1.0, float("inf"), 1.0, 1.0):
        scaler.scale(model(x).square().mean() * factor).backward()
        if is_clipped:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 512.0
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("is_clipped", [False, True])
@pytest.mark.parametrize("make", [SGD, partial(SGD, fused=True), partial(Adam, fused=True)])
@pytest.mark.parametrize("how", ["layers", "model"])
def test_the_scale_has_arrived(emulated: ModuleType, how: str, make: Any, is_clipped: bool) -> None:
    plain = train("device", make, is_clipped=is_clipped)
    emulated.set_delays(d2h_us=300)
    offloaded = train(how, make, is_clipped=is_clipped)
    assert all(map(torch.equal, plain, offloaded))
