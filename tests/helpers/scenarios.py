"""Scenarios of the field: inputs of microbatches, comparisons on any device, and captures.

check_steps(manager, program)      # program(is_on, step) runs one step and returns tensors
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from helpers.nets import Net, inputs
from helpers.sessions import assert_idle, begin_microbatch, drawn, gradients, session
from helpers.toy import same_bits
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    OffloadActivations,
    PipelineOffloadManager,
    fine_grained_offloading_backward_record,
)
from pp_offload.testing import SimulatedBackend

Compute = Callable[[Tensor], Tensor]


def check_steps(
    engine: PipelineOffloadManager | OffloadActivations,
    program: Callable[[bool, int], Sequence[Tensor]],
    *,
    steps: int = 3,
    moves: bool = True,
) -> None:
    """Each step has the bits of the step without offload, and nothing is in use afterwards.

    ``moves`` says that bytes have to be offloaded.
    """
    for step in range(steps):
        expected = program(False, step)
        if isinstance(engine, PipelineOffloadManager):
            engine.reset()
        assert same_bits(program(True, step), expected), step
        assert_idle(engine)
    assert not moves or engine.statistics().bytes_offloaded > 0


def make_inputs(
    num: int, *, step: int = 0, length: int = 4, width: int = 6, device: object = "cpu"
) -> list[Tensor]:
    """The same for the same arguments."""
    drawn_inputs = [drawn(length, width, seed=1000 * step + n) for n in range(num)]
    return [x.to(torch.device(str(device))) for x in drawn_inputs]


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
            begin_microbatch(is_on)
            x = leaf.requires_grad_()
            x = fine_grained_offloading_backward_record(x, Event()) if is_on else x
            outputs.append(net(x).square().mean())
            if is_on:
                off_interface.forward_record(Event())
    for y in outputs:
        with capture():
            y.backward()
    return gradients(*leaves, *net.parameters())
