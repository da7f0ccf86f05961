"""A Llama in stages of a pipeline, of plain modules; attention and MLP of each layer are groups.

stages = [Stage(SIZES["8b"], index, 4, length=8192) for index in range(4)]  # on meta
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface

KIND: Any = {"device": "meta", "dtype": torch.bfloat16}


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    mlp_width: int
    vocabulary: int = 128256

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads


SIZES = {
    "8b": LlamaConfig(32, 4096, 32, 8, 14336),
    "70b": LlamaConfig(80, 8192, 64, 8, 28672),
    "tiny": LlamaConfig(4, 256, 4, 2, 512, vocabulary=1024),
}
"""Those of Llama 3, and one for a smoke test."""


def linear(num_in: int, num_out: int) -> nn.Linear:
    return nn.Linear(num_in, num_out, bias=False, **KIND)


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """By positions, half against half."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


class Attention(nn.Module):
    """Causal, with fewer heads for keys and values."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        kv_width = config.num_kv_heads * config.head_width
        self.norm = nn.RMSNorm(config.width, **KIND)
        self.q = linear(config.width, config.width)
        self.k = linear(config.width, kv_width)
        self.v = linear(config.width, kv_width)
        self.out = linear(config.width, config.width)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (self.heads(part(y)) for part in (self.q, self.k, self.v))
        q, k = (rotated(x, cosines, sines) for x in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))

    def heads(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width, **KIND)
        self.gate = linear(config.width, config.mlp_width)
        self.up = linear(config.width, config.mlp_width)
        self.down = linear(config.mlp_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.down(F.silu(self.gate(y)) * self.up(y))


class Layer(nn.Module):
    """Attention and MLP, each a group with its norm if its name is in ``groups``."""

    def __init__(self, config: LlamaConfig, groups: Collection[str]) -> None:
        super().__init__()
        self.groups = groups
        self.attn = Attention(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, *positions: Tensor) -> Tensor:
        x = x + self.group("attn", self.attn, x, *positions)
        return x + self.group("mlp", self.mlp, x)

    def group(self, name: str, part: nn.Module, x: Tensor, *more: Tensor) -> Tensor:
        """``part(x)``; what it saves for backward leaves the device if the group is wanted."""
        wanted = name in self.groups
        with off_interface(wanted, x, name) as x:
            y = part(x, *more)
        return off_interface.group_commit(y, name=name) if wanted else y


class Stage(nn.Module):
    """One of ``num_stages`` consecutive pieces of the model: tokens in, logits out."""

    def __init__(
        self,
        config: LlamaConfig,
        index: int,
        num_stages: int,
        *,
        length: int,
        groups: Collection[str] = ("attn", "mlp"),
    ) -> None:
        super().__init__()
        first, last = (i * config.num_layers // num_stages for i in (index, index + 1))
        width, vocabulary = config.width, config.vocabulary
        self.embed = nn.Embedding(vocabulary, width, **KIND) if index == 0 else None
        self.layers = nn.ModuleList(Layer(config, groups) for _ in range(first, last))
        self.norm = self.logits = None
        if index == num_stages - 1:
            self.norm = nn.RMSNorm(width, **KIND)
            self.logits = linear(width, vocabulary)
        self.register_buffer("cosines", torch.empty(length, config.head_width, **KIND))
        self.register_buffer("sines", torch.empty(length, config.head_width, **KIND))

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x, self.cosines, self.sines)
        if self.norm is not None and self.logits is not None:
            x = self.logits(self.norm(x))
        return x


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
