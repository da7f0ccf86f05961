"""Scenarios of the field: inputs of microbatches, and comparisons on any device.

check_steps(manager, program)      # program(is_on, step) runs one step and returns tensors
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from helpers.sessions import assert_idle, drawn
from helpers.toy import same_bits
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, PipelineOffloadManager

Compute = Callable[[Tensor], Tensor]


def begin(is_on: bool = True) -> None:
    """The forward of a microbatch begins."""
    if is_on:
        off_interface.init_chunk_handler(None, None, 1)


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
