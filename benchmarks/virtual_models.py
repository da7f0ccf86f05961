"""Layers of three kinds of models on ``meta``, with attention and MLP as groups, norms included.

GPT has layer norms, biases and a GELU of four widths. Llama has RMS norms, a quarter as many heads
of keys as of queries, a SwiGLU of 3.5 widths and no bias. The third has eight such MLPs of half the
width, of which each token goes to two, and all get as many. None has a rotary embedding: it would
be one more pass over queries and keys.

    stage = Stage("llama", width=4096, length=4096, num_layers=2)
    y = stage(stage.microbatch(), offload=True)
    stage.backward(y)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface

HEAD_WIDTH = 128
NUM_EXPERTS, NUM_CHOSEN = 8, 2
KIND: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}


class Layer(nn.Module):
    """Two residual parts, each a group of its own name."""

    attn: nn.Module
    mlp: nn.Module

    def forward(
        self, x: Tensor, *, offload: bool = False, interface: Any = off_interface
    ) -> Tensor:
        for name, part in (("attn", self.attn), ("mlp", self.mlp)):
            with interface(offload, x, name) as inner:  # ours gives back x itself, others mark it
                y = part(inner)
            x = x + (interface.group_commit(y, name=name) if offload else y)
        return x


class GptAttention(nn.Module):
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


class GptMlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, **KIND)
        self.up = nn.Linear(width, 4 * width, **KIND)
        self.down = nn.Linear(4 * width, width, **KIND)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class LlamaAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        num_heads = width // HEAD_WIDTH
        kv_width = max(1, num_heads // 4) * HEAD_WIDTH
        self.norm = nn.RMSNorm(width, **KIND)
        self.query = nn.Linear(width, width, bias=False, **KIND)
        self.key = nn.Linear(width, kv_width, bias=False, **KIND)
        self.value = nn.Linear(width, kv_width, bias=False, **KIND)
        self.out = nn.Linear(width, width, bias=False, **KIND)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (
            one(normed).view(*x.shape[:2], -1, HEAD_WIDTH).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class LlamaMlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = rounded(3.5 * width)
        self.norm = nn.RMSNorm(width, **KIND)
        self.gate = nn.Linear(width, inner, bias=False, **KIND)
        self.up = nn.Linear(width, inner, bias=False, **KIND)
        self.down = nn.Linear(inner, width, bias=False, **KIND)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MoeMlp(nn.Module):
    """Experts with equal loads, each token at two of them. The products of all are one operator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = rounded(1.75 * width)
        self.norm = nn.RMSNorm(width, **KIND)
        self.router = nn.Linear(width, NUM_EXPERTS, bias=False, **KIND)
        self.gate = nn.Parameter(torch.empty(NUM_EXPERTS, width, inner, **KIND))
        self.up = nn.Parameter(torch.empty(NUM_EXPERTS, width, inner, **KIND))
        self.down = nn.Parameter(torch.empty(NUM_EXPERTS, inner, width, **KIND))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).view(-1, x.shape[-1])
        chances = F.softmax(self.router(tokens), dim=-1, dtype=torch.float32)
        weights, experts = chances.topk(NUM_CHOSEN, dim=-1)
        order = experts.view(-1).argsort()  # of the chosen pairs, by expert
        taken = tokens.index_select(0, order // NUM_CHOSEN)
        taken = taken.view(NUM_EXPERTS, -1, x.shape[-1])
        inner = F.silu(torch.bmm(taken, self.gate)) * torch.bmm(taken, self.up)
        found = torch.bmm(inner, self.down).view(-1, x.shape[-1])
        found = found.index_select(0, order.argsort()).view(-1, NUM_CHOSEN, x.shape[-1])
        return (found * weights.to(x.dtype).unsqueeze(-1)).sum(1).view(x.shape)


def rounded(width: float) -> int:
    """The nearest multiple of 256."""
    return round(width / 256) * 256


PARTS: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {
    "gpt": (GptAttention, GptMlp),
    "llama": (LlamaAttention, LlamaMlp),
    "moe": (LlamaAttention, MoeMlp),
}


class Stage(nn.Module):
    """Layers of one rank.

    Args:
        model: A name of :data:`PARTS`.
        width: Of its hidden states.
        length: Tokens of a microbatch.
        num_layers: How many it has.

    ``forward`` takes an ``interface`` to groups: ours, or Megatron's own.
    """

    def __init__(self, model: str, width: int, length: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_layer(model, width) for _ in range(num_layers))
        self._size = (1, length, width)

    def microbatch(self) -> Tensor:
        """An input that needs a gradient, as all stages but the first have."""
        return torch.empty(self._size, **KIND, requires_grad=True)

    def forward(
        self, x: Tensor, *, offload: bool = False, interface: Any = off_interface
    ) -> Tensor:
        for layer in self.layers:
            x = layer(x, offload=offload, interface=interface)
        return x

    @staticmethod
    def backward(y: Tensor) -> None:
        """With the gradient that the next stage has sent."""
        y.backward(torch.empty_like(y))


def _layer(model: str, width: int) -> Layer:
    layer = Layer()
    layer.attn, layer.mlp = (part(width) for part in PARTS[model])
    return layer
