"""Layers of large products on a virtual device, whose steps are arithmetic."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, use_backend
from pp_offload.simulate import DEVICES, Hardware, VirtualBackend


class Layers(nn.Module):
    """Products of which each saves its input; a group around each."""

    def __init__(self, num: int, width: int) -> None:
        super().__init__()
        kind: Any = {"device": "meta", "dtype": torch.bfloat16, "bias": False}
        self.layers = nn.ModuleList(nn.Linear(width, width, **kind) for _ in range(num))

    def forward(self, x: Tensor, *, offload: bool = True) -> Tensor:
        for layer in self.layers:
            with off_interface(offload, x, "layer"):
                y = layer(x)
            x = off_interface.group_commit(y, name="layer") if offload else y
        return x


WIDTH, ROWS, NUM, STEPS = 4096, 8192, 24, 4

FLOPS = 2 * ROWS * WIDTH * WIDTH
"""Of a forward of one layer."""

SAVED_BYTES = ROWS * WIDTH * 2


def hardware(copies_to_compute: float) -> Hardware:
    """One on which a layer's copy takes so many times its forward."""
    machine = DEVICES["H100"]
    forward_s = FLOPS / (machine.matmul_flops * machine.matmul_fraction)
    return replace(machine, link_bytes_per_s=SAVED_BYTES / (forward_s * copies_to_compute))


def step_s(
    machine: Hardware,
    *,
    offload: bool,
    in_flight: int,
    window: int = 12,
    is_blocking: bool = False,
) -> tuple[float, int]:
    """Seconds of a step in the steady state of microbatches in turn, and the peak of bytes.

    Args:
        machine: The device.
        offload: Whether groups leave.
        in_flight: Forwards before the first backward.
        window: Layers that may be under way, in each direction.
        is_blocking: Whether the host waits for each operator.
    """
    backend = VirtualBackend(machine, is_blocking=is_blocking)
    nbytes = window * SAVED_BYTES
    config = OffloadConfig(
        device_limit_bytes=None, max_in_flight_bytes=nbytes, prefetch_bytes=nbytes
    )
    with use_backend(backend, config=config):
        model = Layers(NUM, WIDTH)
        waiting: deque[Tensor] = deque()
        off_interface.reset()
        for number in range(in_flight + STEPS):
            if number == in_flight:
                begin_s = backend.compute.free_at_s
                backend.memory.take_peak()
            if len(waiting) == in_flight:
                y = waiting.popleft()
                y.backward(torch.empty_like(y))
                del y
            off_interface.init_chunk_handler(None, None, 1)
            x = torch.empty(ROWS, WIDTH, device="meta", dtype=torch.bfloat16, requires_grad=True)
            waiting.append(model(x, offload=offload))
        seconds = (backend.compute.free_at_s - begin_s) / STEPS
        return seconds, backend.memory.peak_bytes
