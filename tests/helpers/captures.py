"""Steps of which each part may be a capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor

from helpers.nets import Net, inputs
from helpers.scenarios import begin
from helpers.sessions import gradients, session
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import fine_grained_offloading_backward_record
from pp_offload.testing import SimulatedBackend


class Event:
    """What the reference gives: recorded on the stream it is told."""

    def record(self, stream: Any) -> None:
        self.at = stream.record_event()


@contextmanager
def manager_of(order: str = "late", **options: Any) -> Iterator[tuple[Any, Any]]:
    device = SimulatedBackend(order)
    with session(device, **options) as manager:
        yield manager, device


def step(net: Net, device: Any = None, *, is_on: bool = True) -> list[Tensor]:
    """Forward and backward of two microbatches; with a device, each is a capture of its own."""
    capture = nullcontext if device is None else device.capture
    net.is_on = is_on
    if is_on:
        off_interface.reset()
    leaves, outputs = inputs(2), []
    for leaf in leaves:
        with capture():
            begin(is_on)
            x = leaf.requires_grad_()
            x = fine_grained_offloading_backward_record(x, Event()) if is_on else x
            outputs.append(net(x).square().mean())
            if is_on:
                off_interface.forward_record(Event())
    for y in outputs:
        with capture():
            y.backward()
    return gradients(*leaves, *net.parameters())
