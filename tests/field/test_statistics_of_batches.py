"""Batch norm writes its statistics and counts no change: a forward in evaluation saves them, and a
later one in training changes them while the first is in flight.

Autograd reads what is there at the backward. A copy that a group shares, or that was made while the
statistics were written, has something else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import permutations

import pytest
import torch
from conftest import on_two_backends
from torch import Tensor, nn
from torch.nn import functional as F
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, PipelineOffloadManager

CHANNELS = 300  # one vector of statistics is above the limit of OffloadActivations

Compute = Callable[[Tensor], Tensor]
Inside = Callable[[Compute, Tensor], Tensor]


class Norm(nn.Module):
    """Its forward is inside ``inside``, so that no context is there when it begins."""

    def __init__(self, inside: Inside) -> None:
        super().__init__()
        self.inside = inside
        self.weight = nn.Parameter(torch.linspace(1, 2, CHANNELS))
        self.statistics = self.made()

    def made(self) -> list[Tensor]:
        return [torch.zeros(CHANNELS), torch.ones(CHANNELS)]

    def compute(self, x: Tensor) -> Tensor:
        mean, variance = self.statistics
        return F.batch_norm(x, mean, variance, self.weight, None, self.training).sin()

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(self.compute, x)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Norm:
        self.statistics = [fn(one) for one in self.statistics]
        return super()._apply(fn, recurse)  # type: ignore[return-value]


class Halves(Norm):
    """Statistics of one storage."""

    def made(self) -> list[Tensor]:
        table = torch.zeros(2, CHANNELS)
        table[1] = 1
        return list(table)


class Module(Norm):
    """Buffers of a module that runs inside, and that nobody was told of."""

    def made(self) -> list[Tensor]:
        self.norm = nn.BatchNorm1d(CHANNELS)
        return []

    def compute(self, x: Tensor) -> Tensor:
        return self.norm(x).sin()


KINDS = {"tensors": Norm, "rows": Halves, "module": Module}


def without(compute: Compute, x: Tensor) -> Tensor:
    return compute(x)


def in_markers(compute: Compute, x: Tensor) -> Tensor:
    with off_interface(True, x, "norm") as x:
        y = compute(x)
    return off_interface.group_commit(y, name="norm")


def step(
    norm: Norm, orders: tuple[int, ...], trains: tuple[bool, ...], begin: Callable[[], object]
) -> list[Tensor]:
    """Forwards in evaluation or training, and then their backwards in some order."""
    device = norm.weight.device
    inputs, losses = [], []
    for number, is_training in enumerate(trains):
        begin()
        generator = torch.Generator().manual_seed(number)
        inputs.append(torch.randn(6, CHANNELS, generator=generator).to(device).requires_grad_())
        losses.append(norm.train(is_training)(2 * inputs[-1]).square().mean())
    for number in orders:
        losses[number].backward()
    return [*(one.detach() for one in losses), *(x.grad for x in inputs if x.grad is not None)]


def nothing() -> None:
    """Nobody has to know that a forward begins."""


def expected_of(kind: type[Norm], device: torch.device, *args: tuple[int, ...]) -> list[Tensor]:
    return step(kind(without).to(device), *args, nothing)


all_kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
all_trains = pytest.mark.parametrize(
    "trains", [(False, True, False), (False, False, True), (True, False, True)]
)


@on_two_backends
@all_kinds
@all_trains
def test_statistics_of_a_group_are_those_of_the_last_training(
    manager: PipelineOffloadManager, kind: type[Norm], trains: tuple[bool, ...]
) -> None:
    device = manager.backend.device
    for order in permutations(range(3)):
        manager.reset()
        begin = partial(manager.init_model_chunk_offload_handler, None, None, 1)
        found = step(kind(in_markers).to(device), order, trains, begin)
        assert same_bits(found, expected_of(kind, device, order, trains)), order
        assert manager.statistics().bytes_offloaded > 0
    manager.reset()
    assert_idle(manager)


@on_two_backends
@all_kinds
@all_trains
def test_statistics_in_a_context_are_those_of_the_last_training(
    manager: PipelineOffloadManager, kind: type[Norm], trains: tuple[bool, ...]
) -> None:
    device = manager.backend.device
    context = OffloadActivations(min_offload_size=1, max_fwd_stash_size=2, backend=manager.backend)

    def inside(compute: Compute, x: Tensor) -> Tensor:
        with context:
            return compute(x)

    for order in permutations(range(3)):
        found = step(kind(inside).to(device), order, trains, nothing)
        assert same_bits(found, expected_of(kind, device, order, trains)), order
    assert context.statistics().bytes_offloaded > 0
