"""A chain of linear layers, each a group that saves one large tensor, and the device to run it on.

layers = Layers(device_of("cuda"), num=6, group_bytes=700 * 2**20)
seconds = layers.step(offload=True)
"""

from __future__ import annotations

import time

import torch
from machine import synchronize
from torch import Tensor, nn

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface


class Layers(nn.Module):
    """Each saves its input, and little else.

    Args:
        device: Where it computes; in float32 where that is made of CPU cores, else in bfloat16.
        num: How many.
        group_bytes: What each saves, about.
        width: Of a row.
    """

    def __init__(self, device: torch.device, num: int, group_bytes: int, width: int) -> None:
        super().__init__()
        self.device = device
        dtype = torch.float32 if device.type in ("cpu", "emulated") else torch.bfloat16
        torch.manual_seed(0)
        layers = (nn.Linear(width, width, bias=False) for _ in range(num))
        self.layers = nn.ModuleList(layers).to(device, dtype)
        num_rows = max(1, group_bytes // (width * dtype.itemsize))
        self.x = torch.randn(num_rows, width).to(device, dtype)

    def forward(self, x: Tensor, offload: bool) -> Tensor:
        for layer in self.layers:
            with off_interface(offload, x, "layer") as x:
                y = layer(x)
            x = off_interface.group_commit(y, name="layer") if offload else y
        return x

    def step(self, *, offload: bool) -> float:
        """Seconds of a forward and a backward; the gradients stay."""
        self.zero_grad()
        synchronize(self.device)
        start = time.perf_counter()
        if offload:
            off_interface.reset()
            off_interface.init_chunk_handler(None, None, 1)
        with torch.profiler.record_function("forward"):
            loss = self(self.x, offload).sum()
        with torch.profiler.record_function("backward"):
            loss.backward()
        synchronize(self.device)
        return time.perf_counter() - start

    def gradients(self) -> list[Tensor]:
        """Of the last step."""
        return [p.grad.clone() for p in self.parameters() if p.grad is not None]
