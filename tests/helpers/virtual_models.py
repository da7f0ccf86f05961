"""Models on ``meta``, whose steps are arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload.simulate import DEVICES, Hardware, Modules

KIND: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}


def chain(
    num: int, layers: Callable[[], Sequence[nn.Module]], example: Tensor, /, **options: Any
) -> Modules:
    """Stages of such layers, each of which is a group, with a sum as the loss."""
    stages = [nn.Sequential(*layers()) for _ in range(num)]
    options = {"loss_fn": lambda y: y.sum(), "groups": {"layer": "*"}} | options
    return Modules(stages, example=example, **options)


class Layers(nn.Module):
    """Products of which each saves its input; a group around each."""

    def __init__(self, num: int, width: int) -> None:
        super().__init__()
        layers = [nn.Linear(width, width, bias=False, **KIND) for _ in range(num)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, *, offload: bool = True) -> Tensor:
        for layer in self.layers:
            with off_interface(offload, x, "layer"):
                y = layer(x)
            x = off_interface.group_commit(y, name="layer") if offload else y
        return x


WIDTH, ROWS = 4096, 8192

FLOPS = 2 * ROWS * WIDTH * WIDTH
"""Of a forward of one layer."""

SAVED_BYTES = ROWS * WIDTH * 2


def hardware(copies_to_compute: float) -> Hardware:
    """A device on which a layer's copy takes so many times its forward."""
    machine = DEVICES["H100"]
    forward_s = FLOPS / (machine.matmul_flops * machine.matmul_fraction)
    return replace(machine, link_bytes_per_s=SAVED_BYTES / (forward_s * copies_to_compute))
