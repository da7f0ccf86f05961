"""A byte-level GPT that splits into pipeline stages, with both ways of marking offload groups.

Markers: a layer built with ``groups={"attn", "mlp"}`` opens and commits those groups itself.
By name: a layer built without leaves it to ``offload_modules`` or ``attach(schedule, groups=...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface

VOCABULARY = 256


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model."""

    num_layers: int = 8
    width: int = 128
    num_heads: int = 4
    context: int = 128
    groups: tuple[str, ...] = ()
    """Parts of a layer that mark themselves as groups."""


class Attention(nn.Module):
    """Causal self-attention with one projection for q, k and v."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    """Up, GELU, down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    """Pre-norm attention and MLP, each a group if its name is in ``groups``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.groups: Collection[str] = config.groups
        self.attn_norm = nn.LayerNorm(config.width)
        self.attn = Attention(config.width, config.num_heads)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.group("attn", self.attn, self.attn_norm(x))
        return x + self.group("mlp", self.mlp, self.mlp_norm(x))

    def group(self, name: str, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``part(x)``; what it saves for backward leaves the device if the group is wanted."""
        wanted = name in self.groups
        with off_interface(wanted, x, name) as x:
            y = part(x)
        return off_interface.group_commit(y, name=name) if wanted else y


class Stage(nn.Module):
    """One of ``num_stages`` consecutive pieces of the model: bytes in, logits out."""

    def __init__(self, config: GPTConfig, index: int, num_stages: int) -> None:
        super().__init__()
        first, last = (i * config.num_layers // num_stages for i in (index, index + 1))
        self.embed = Embedding(config) if index == 0 else None
        self.layers = nn.ModuleList(Layer(config) for _ in range(first, last))
        self.head = Head(config) if index == num_stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


class Embedding(nn.Module):
    """Of bytes and positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.byte(tokens) + self.position(positions)


class Head(nn.Module):
    """Norm and logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.logits = nn.Linear(config.width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


def count_up(step: int, batch: int, context: int) -> Tensor:
    """Bytes to learn: ``batch`` sequences that count, each one byte more than the model sees."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (batch, 1), generator=generator)
    return (start + torch.arange(context + 1)) % VOCABULARY


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the next byte, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
