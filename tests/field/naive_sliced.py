"""A model in slices as it has been written elsewhere, with the failures of row F11.

It keeps what a forward leaves on itself, and runs every slice again in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class NaiveSlicedModel(nn.Module):
    """Trains in plain use: one forward of one tensor, then its backward, and nothing random."""

    def __init__(self, model: nn.Sequential, **_: Any) -> None:
        super().__init__()
        self.slices = model
        self.anchor = torch.zeros((), requires_grad=True)
        self.kept: list[Tensor] = []

    def forward(self, *inputs: Tensor) -> Tensor:
        return _AllSlices.apply(self, self.anchor, *inputs)


class _AllSlices(torch.autograd.Function):
    """The inputs of all slices are kept; another forward overwrites them."""

    @staticmethod
    def forward(ctx: Any, model: NaiveSlicedModel, anchor: Tensor, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        ctx.model = model
        model.kept = []
        for one in model.slices:
            model.kept.append(x)
            x = one(x)
        return x.squeeze(-1).requires_grad_()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        model = ctx.model
        for one, x in zip(reversed(model.slices), reversed(model.kept), strict=True):
            leaf = x.detach().requires_grad_(x.is_floating_point())
            with torch.enable_grad():
                y = one(leaf)
            y.backward(gradient.view(y.shape))
            gradient = leaf.grad
        return None, None, None
