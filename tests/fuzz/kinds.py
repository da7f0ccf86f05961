"""What programs compute: small operations that save, alias and change tensors in many ways.

Each works on tensors of any shape, so that a program can name any tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

WIDTH = 4
"""Of inputs and weights."""

SHAPES = [(WIDTH, WIDTH)] * 2 + [(WIDTH,)] * 2
"""Of the weights of a stage."""


class KeepsViews(torch.autograd.Function):
    """Saves its input and three views of it, one of another dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        ctx.save_for_backward(x, x.transpose(0, -1) if x.dim() else x, flat[1:], bits(flat))
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, turned, rest, integers = ctx.saved_tensors
        scale = turned.sum() + rest.sum() + (integers % 7).sum()
        return gradient * (x + scale.to(x.dtype))


class GivesSaved(torch.autograd.Function):
    """Its backward returns a view of what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.view_as(x)


class ReadsTwice(torch.autograd.Function):
    """Its backward asks for its saved tensors twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.cos()
        ctx.save_for_backward(x, y)
        return y * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, _ = ctx.saved_tensors
        _, y = ctx.saved_tensors
        return gradient * (x + y)


def bits(x: Tensor) -> Tensor:
    """Its bytes as integers; the same memory."""
    return x.detach().view(torch.int16 if x.itemsize >= 2 else torch.uint8)


def fit(b: Tensor, a: Tensor) -> Tensor:
    """``b`` as something that can be combined with ``a`` element by element."""
    b = b.to(a.dtype)
    return b if b.shape == a.shape else b.sum() / max(1, b.numel())


def linear(x: Tensor, weight: Tensor) -> Tensor:
    if x.dim() == 0 or x.shape[-1] != WIDTH:
        return x.sin()
    return F.linear(x.to(weight.dtype), weight)


def halves(x: Tensor, cut: Callable[[Tensor, int], Any]) -> Tensor:
    return cut(x, 2)[-1] if x.dim() else x


def recomputed(x: Tensor) -> Tensor:
    return torch.tanh(x.sin() * 2)


def topmost(x: Tensor) -> Tensor:
    """Its backward scatters by indices."""
    return x.sort(0).values if x.dim() else x


def normed(
    x: Tensor, weights: list[Tensor], norm: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    if x.dim() == 0 or x.shape[-1] != WIDTH:
        return F.silu(x)
    return norm(x, weights[2].to(x.dtype), weights[3].to(x.dtype))


def composed_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As in Hugging Face's models."""
    full = x.float()
    full = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * full.to(x.dtype)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """A rotary embedding."""
    half = x.shape[-1] // 2 if x.dim() else 0
    if 2 * half != (x.shape[-1] if x.dim() else 1):
        return x.neg()
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * angles.cos() + turned * angles.sin()


def repeated(x: Tensor) -> Tensor:
    """Each row twice, as grouped queries share keys; twice as many are a tensor of their own."""
    if x.dim() == 0:
        return x.exp()
    return x[:, None].expand(len(x), 2, *x.shape[1:]).reshape(-1, *x.shape[1:])


Weights = list[Tensor]
COMPUTES: dict[str, Callable[[Tensor, Tensor, Weights], Tensor]] = {
    "tanh": lambda a, b, w: a.tanh(),
    "mul": lambda a, b, w: a * fit(b, a),
    "linear": lambda a, b, w: linear(a, w[0]),
    "linear 1": lambda a, b, w: linear(a, w[1]),
    "add": lambda a, b, w: a + fit(b, a),
    "sigmoid": lambda a, b, w: a.sigmoid(),
    "sin": lambda a, b, w: a.sin(),
    "where": lambda a, b, w: torch.where(a > 0, a, fit(b, a)),
    "softmax": lambda a, b, w: a.softmax(-1) if a.dim() else a.relu(),
    "norm": lambda a, b, w: F.layer_norm(a, a.shape[-1:]) if a.dim() and a.numel() else a.sin(),
    "gelu": lambda a, b, w: F.gelu(a),
    "gelu, tanh": lambda a, b, w: F.gelu(a, approximate="tanh"),
    "swiglu": lambda a, b, w: F.silu(a) * fit(b, a),
    "square of relu": lambda a, b, w: a.relu().square(),
    "div": lambda a, b, w: a / (fit(b, a).exp() + 1),
    "layer norm": lambda a, b, w: normed(
        a, w, lambda x, scale, shift: F.layer_norm(x, x.shape[-1:], scale, shift, 1e-6)
    ),
    "rms norm": lambda a, b, w: normed(
        a, w, lambda x, scale, _: F.rms_norm(x, x.shape[-1:], scale, 1e-5)
    ),
    "composed rms norm": lambda a, b, w: normed(
        a, w, lambda x, scale, _: composed_rms_norm(x, scale)
    ),
    "group norm": lambda a, b, w: normed(
        a, w, lambda x, scale, shift: F.group_norm(x.reshape(-1, WIDTH), 2, scale, shift)
    ),
    "log softmax": lambda a, b, w: a.log_softmax(-1) if a.dim() else a.neg(),
    "dropout": lambda a, b, w: F.dropout(a, 0.25),
    "rotated": lambda a, b, w: rotated(a, fit(b, a)),
    "repeated": lambda a, b, w: repeated(a),
    "stack": lambda a, b, w: torch.stack([a, fit(b, a).expand_as(a)]),
    "half": lambda a, b, w: a.half(),
    "float": lambda a, b, w: a.float(),
    "sort": lambda a, b, w: topmost(a),
    "clone": lambda a, b, w: a.clone(),
    "detach": lambda a, b, w: a.detach(),
    "turn": lambda a, b, w: a.transpose(0, -1) if a.dim() else a.view_as(a),
    "rest": lambda a, b, w: a[1:] if a.dim() and len(a) > 1 else a.view_as(a),
    "even": lambda a, b, w: a[::2] if a.dim() else a.view_as(a),
    "narrow": lambda a, b, w: a[..., :2] if a.dim() else a.view_as(a),
    "expand": lambda a, b, w: a[:1].expand_as(a) if a.dim() and len(a) else a.view_as(a),
    "flat": lambda a, b, w: a.reshape(-1),
    "chunk": lambda a, b, w: halves(a, torch.chunk),
    "unsafe chunk": lambda a, b, w: halves(a * 1.5, torch.unsafe_chunk),
    "bfloat16": lambda a, b, w: a.bfloat16(),
    "double": lambda a, b, w: a.double(),
    "keeps views": lambda a, b, w: KeepsViews.apply(a),
    "gives saved": lambda a, b, w: GivesSaved.apply(a),
    "reads twice": lambda a, b, w: ReadsTwice.apply(a),
    "checkpoint": lambda a, b, w: checkpoint(
        recomputed, a, use_reentrant=False, preserve_rng_state=False
    ),
}

CHANGES: dict[str, Callable[[Tensor], object]] = {
    "add": lambda t: t.add_(1),
    "mul": lambda t: t.mul_(0.5),
    "relu": lambda t: t.relu_(),
    "sigmoid": lambda t: t.sigmoid_(),
    "zero": lambda t: t.zero_(),
}
