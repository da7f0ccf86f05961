"""Forwards with everything saved offloaded, and their backwards in several orders."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor, nn

from pp_offload import OffloadActivations


def gradients(model: nn.Module, leaves: list[Tensor]) -> list[Tensor]:
    gradients = [t.grad.clone() for t in (*leaves, *model.parameters()) if t.grad is not None]
    model.zero_grad()
    return gradients


Program = Callable[[nn.Module, list[Tensor], OffloadActivations | None], list[Tensor]]


def forward(
    model: Callable[[Tensor], Tensor], x: Tensor, offload: OffloadActivations | None
) -> Tensor:
    with offload or nullcontext():
        return model(x).square().mean()


def one_by_one(model, leaves, offload):
    for x in leaves:
        forward(model, x, offload).backward()
    return gradients(model, leaves)


def first_in_first_out(model, leaves, offload):
    losses = [forward(model, x, offload) for x in leaves]
    for loss in losses:
        loss.backward()
    return gradients(model, leaves)


def last_in_first_out(model, leaves, offload):
    losses = [forward(model, x, offload) for x in leaves]
    while losses:
        losses.pop().backward()
    return gradients(model, leaves)
