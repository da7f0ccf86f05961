"""Layers of GPT on ``meta``, with attention and MLP as groups, norms included.

Layer norms, biases, a GELU of four widths, and no rotary embedding: it would be one more pass over
queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload.simulate import Modules

HEAD_WIDTH = 128
KIND: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}


def chain(
    num: int, layers: Callable[[], Sequence[nn.Module]], example: Tensor, /, **options: Any
) -> Modules:
    """Stages of such layers, each of which is a group, with a sum as the loss."""
    stages = [nn.Sequential(*layers()) for _ in range(num)]
    options = {"loss_fn": lambda y: y.sum(), "groups": {"layer": "*"}} | options
    return Modules(stages, example=example, **options)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, **KIND)
        self.qkv = nn.Linear(width, 3 * width, **KIND)
        self.out = nn.Linear(width, width, **KIND)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, 3, width // HEAD_WIDTH, HEAD_WIDTH)
        q, k, v = self.qkv(self.norm(x)).view(heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, **KIND)
        self.up = nn.Linear(width, 4 * width, **KIND)
        self.down = nn.Linear(4 * width, width, **KIND)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Layer(nn.Module):
    """Two residual parts, each a group of its own name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(width), Mlp(width)

    def forward(self, x: Tensor, *, offload: bool = False) -> Tensor:
        for name, part in (("attn", self.attn), ("mlp", self.mlp)):
            with off_interface(offload, x, name):
                y = part(x)
            x = x + (off_interface.group_commit(y, name=name) if offload else y)
        return x


class Stage(nn.Module):
    """Layers of a rank."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))

    def forward(self, x: Tensor, *, offload: bool = False) -> Tensor:
        for layer in self.layers:
            x = layer(x, offload=offload)
        return x
