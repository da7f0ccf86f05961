"""Small operators that save, alias and change tensors in many ways; each takes any shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.saving import GivesSaved, ReadsTwice

WIDTH = 4
"""Of inputs and weights."""

SHAPES = [(WIDTH, WIDTH)] + [(WIDTH,)] * 2
"""Of the weights of a stage."""

Weights = list[Tensor]


class KeepsViews(torch.autograd.Function):
    """Saves its input and three views of it, one of another dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        integers = flat.detach().view(torch.int16 if x.itemsize >= 2 else torch.uint8)
        ctx.save_for_backward(x, x.transpose(0, -1) if x.dim() else x, flat[1:], integers)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, turned, rest, integers = ctx.saved_tensors
        scale = turned.sum() + rest.sum() + (integers % 7).sum()
        return gradient * (x + scale.to(x.dtype))


def fit(b: Tensor, a: Tensor) -> Tensor:
    """``b`` as something that can be combined with ``a`` element by element."""
    b = b.to(a.dtype)
    return b if b.shape == a.shape else b.sum() / max(1, b.numel())


def of_rows(x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """``compute`` where there are rows of the weights' width, and else another operator."""
    return compute(x) if x.dim() and x.shape[-1] == WIDTH else F.silu(x)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As in Hugging Face's models."""
    full = x.float()
    full = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight.to(x.dtype) * full.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), weight.to(x.dtype), bias.to(x.dtype), 1e-6)


COMPUTES: dict[str, Callable[[Tensor, Tensor, Weights], Tensor]] = {
    "tanh": lambda a, b, w: a.tanh(),
    "mul": lambda a, b, w: a * fit(b, a),
    "linear": lambda a, b, w: of_rows(a, lambda x: F.linear(x.to(w[0].dtype), w[0])),
    "add": lambda a, b, w: a + fit(b, a),
    "sin": lambda a, b, w: a.sin(),
    "where": lambda a, b, w: torch.where(a > 0, a, fit(b, a)),
    "softmax": lambda a, b, w: a.softmax(-1) if a.dim() else a.relu(),
    "gelu": lambda a, b, w: F.gelu(a),
    "swiglu": lambda a, b, w: F.silu(a) * fit(b, a),
    "div": lambda a, b, w: a / (fit(b, a).exp() + 1),
    "layer norm": lambda a, b, w: of_rows(a, lambda x: layer_norm(x, w[1], w[2])),
    "rms norm": lambda a, b, w: of_rows(a, lambda x: rms_norm(x, w[1])),
    "dropout": lambda a, b, w: F.dropout(a, 0.25),
    "repeated": lambda a, b, w: (
        a[:, None].expand(len(a), 2, *a.shape[1:]).flatten(0, 1) if a.dim() else a.exp()
    ),
    "stack": lambda a, b, w: torch.stack([a, fit(b, a).expand_as(a)]),
    "bfloat16": lambda a, b, w: a.bfloat16(),
    "double": lambda a, b, w: a.double(),
    "float": lambda a, b, w: a.float(),
    "sort": lambda a, b, w: a.sort(0).values if a.dim() else a,
    "clone": lambda a, b, w: a.clone(),
    "detach": lambda a, b, w: a.detach(),
    "turn": lambda a, b, w: a.transpose(0, -1) if a.dim() else a.view_as(a),
    "rest": lambda a, b, w: a[1:] if a.dim() and len(a) > 1 else a.view_as(a),
    "even": lambda a, b, w: a[..., ::2] if a.dim() else a.view_as(a),
    "expand": lambda a, b, w: a[:1].expand_as(a) if a.dim() and len(a) else a.view_as(a),
    "flat": lambda a, b, w: a.reshape(-1),
    "unsafe chunk": lambda a, b, w: (a * 1.5).unsafe_chunk(2)[-1] if a.dim() else a * 1.5,
    "keeps views": lambda a, b, w: KeepsViews.apply(a),
    "gives saved": lambda a, b, w: GivesSaved.apply(a),
    "reads twice": lambda a, b, w: ReadsTwice.apply(a),
}

CHANGES: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda t: t.add_(1),
    "mul_": lambda t: t.mul_(0.5),
    "sigmoid_": lambda t: t.sigmoid_(),
}
