"""Scenarios of the field: chains of groups, and comparisons on any device.

check_steps(manager, program)      # program(is_on, step) runs one step and returns tensors
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from helpers.sessions import group
from helpers.toy import assert_idle, same_bits
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload.backends import Backend

Compute = Callable[[Tensor], Tensor]


def begin(is_on: bool = True, stages: int | None = None, stage: int | None = None) -> None:
    """The forward of a microbatch begins."""
    if is_on:
        off_interface.init_chunk_handler(stages, stage, 1)


@contextmanager
def manager_on(backend: Backend, **options: Any) -> Iterator[PipelineOffloadManager]:
    """A manager of its own, for tensors of any size."""
    config = OffloadConfig(**{"min_offloaded_tensor_size": 1, **options})
    with use_backend(backend, config=config) as manager:
        yield manager


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


class Chain(nn.Module):
    """Layers of named parts, each a group that saves three tensors. The same weights every time."""

    def __init__(
        self,
        names: Sequence[str] = ("a", "b"),
        layers: int = 3,
        width: int = 6,
        *,
        is_on: bool = True,
        device: torch.device | str = "cpu",
        seed: int = 1,
    ) -> None:
        super().__init__()
        self.is_on = is_on
        self.names = [name for _ in range(layers) for name in names]
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(width, width, generator=generator) / 2 for _ in self.names]
        self.weights = nn.ParameterList([nn.Parameter(w.to(device)) for w in weights])

    def forward(self, x: Tensor) -> Tensor:
        for name, weight in zip(self.names, self.weights, strict=True):
            x = x + part(name, x, weight, self.is_on)
        return x


def part(name: str, x: Tensor, weight: Tensor, is_on: bool) -> Tensor:
    """One group: three tensors are saved in it."""
    return group(x, lambda x: torch.tanh(x @ weight).sin(), is_on, name)


def make_inputs(
    num: int, *, step: int = 0, length: int = 4, width: int = 6, device: object = "cpu"
) -> list[Tensor]:
    """The same for the same arguments."""
    generator = torch.Generator().manual_seed(1000 * step + length)
    drawn = [torch.randn(length, width, generator=generator) for _ in range(num)]
    return [x.to(torch.device(str(device))) for x in drawn]
