"""Batch norm writes its statistics and counts no change; autograd reads what is there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import permutations

import pytest
import torch
from conftest import on_two_backends
from helpers.scenarios import begin, check_steps, make_inputs
from helpers.sessions import gradients, group
from torch import Tensor, nn
from torch.nn import functional as F

from pp_offload import (
    OffloadActivations,
    PipelineOffloadManager,
)

CHANNELS = 300  # one vector of statistics is above the limit of OffloadActivations


class Norm(nn.Module):
    """Batch norm inside ``inside``, of statistics that are buffers, or rows of one tensor."""

    def __init__(self, inside: Callable[..., Tensor], is_module: bool) -> None:
        super().__init__()
        self.inside = inside
        self.norm = nn.BatchNorm1d(CHANNELS) if is_module else None
        self.register_buffer("rows", torch.tensor([[0.0], [1.0]]).expand(2, CHANNELS).clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(self.compute, x)

    def compute(self, x: Tensor) -> Tensor:
        if self.norm is not None:
            return self.norm(x).sin()
        return F.batch_norm(x, *self.rows, None, None, self.training).sin()


@on_two_backends
@pytest.mark.parametrize("is_module", [True, False], ids=["module", "rows"])
@pytest.mark.parametrize("is_context", [True, False], ids=["context", "group"])
@pytest.mark.parametrize("trains", [(False, True, False), (True, False, True)])
def test_statistics_are_those_of_the_last_training(
    manager: PipelineOffloadManager, is_module: bool, is_context: bool, trains: tuple[bool, ...]
) -> None:
    """Batch norm writes them and counts no change; autograd reads what is there at the backward."""
    device = manager.backend.device
    context = OffloadActivations(min_offload_size=1, max_fwd_stash_size=2, backend=manager.backend)

    def inside(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if not is_context:
            return group(x, compute)
        with context:
            return compute(x)

    def step(is_on: bool, number: int, order: tuple[int, ...]) -> list[Tensor]:
        norm = Norm(inside if is_on else lambda compute, x: compute(x), is_module).to(device)
        inputs = make_inputs(3, length=6, width=CHANNELS, device=device)
        losses = []
        for x, is_training in zip(inputs, trains, strict=True):
            begin(is_on)
            losses.append(norm.train(is_training)(2 * x.requires_grad_()).square().mean())
        for index in order:
            losses[index].backward()
        return [*(loss.detach() for loss in losses), *gradients(*inputs)]

    for order in permutations(range(3)):
        check_steps(manager, partial(step, order=order), steps=1, moves=not is_context)
