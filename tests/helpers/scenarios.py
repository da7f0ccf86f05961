"""Scenarios of the field: chains of groups, and comparisons on any device.

check_steps(manager, program)      # program(is_on, step) runs one step and returns tensors
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from helpers.nets import Net
from helpers.sessions import drawn
from helpers.toy import assert_idle, same_bits
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, PipelineOffloadManager

Compute = Callable[[Tensor], Tensor]


def begin(is_on: bool = True, stages: int | None = None, stage: int | None = None) -> None:
    """The forward of a microbatch begins."""
    if is_on:
        off_interface.init_chunk_handler(stages, stage, 1)


def check_steps(
    engine: PipelineOffloadManager | OffloadActivations,
    program: Callable[[bool, int], Sequence[Tensor]],
    *,
    steps: int = 3,
    moves: bool = True,
) -> None:
    """Each step has the bits of the step without offload, and nothing is in use afterwards.

    Args:
        engine: Of ``statistics()``.
        program: Runs one step, with offload if its first argument is True.
        steps: How many.
        moves: Whether bytes have to be offloaded.
    """
    for step in range(steps):
        expected = program(False, step)
        if isinstance(engine, PipelineOffloadManager):
            engine.reset()
        assert same_bits(program(True, step), expected), step
        assert_idle(engine)
    assert not moves or engine.statistics().bytes_offloaded > 0


class Chain(Net):
    """Three layers of two groups, each of which saves three tensors."""

    def __init__(
        self,
        names: Sequence[str] = ("a", "b"),
        layers: int = 3,
        *,
        is_on: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(names, layers, width=6)
        self.is_on = is_on
        self.to(device)


def make_inputs(
    num: int, *, step: int = 0, length: int = 4, width: int = 6, device: object = "cpu"
) -> list[Tensor]:
    """The same for the same arguments."""
    drawn_inputs = [drawn(length, width, seed=1000 * step + n) for n in range(num)]
    return [x.to(torch.device(str(device))) for x in drawn_inputs]
