"""Layers of GPT and Llama on ``meta``, with attention and MLP as groups, norms included.

GPT has layer norms, biases and a GELU of four widths. Llama has RMS norms, a quarter as many heads
of keys as of queries, a SwiGLU of 3.5 widths and no bias. Neither has a rotary embedding: it would
be one more pass over queries and keys.

    stage = Stage("llama", width=4096, length=4096, num_layers=2)
    y = stage(stage.microbatch(), offload=True)
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


class Layer(nn.Module):
    """Two residual parts, each a group of its own name."""

    def __init__(self, model: str, width: int) -> None:
        super().__init__()
        attention, mlp = PARTS[model]
        self.attn, self.mlp = attention(width), mlp(width)

    def forward(self, x: Tensor, *, offload: bool = False) -> Tensor:
        for name, part in (("attn", self.attn), ("mlp", self.mlp)):
            with off_interface(offload, x, name):
                y = part(x)
            x = x + (off_interface.group_commit(y, name=name) if offload else y)
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
            projection(normed).view(*x.shape[:2], -1, HEAD_WIDTH).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class LlamaMlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = round(3.5 * width / 256) * 256
        self.norm = nn.RMSNorm(width, **KIND)
        self.gate = nn.Linear(width, inner, bias=False, **KIND)
        self.up = nn.Linear(width, inner, bias=False, **KIND)
        self.down = nn.Linear(inner, width, bias=False, **KIND)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


PARTS: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {
    "gpt": (GptAttention, GptMlp),
    "llama": (LlamaAttention, LlamaMlp),
}


class Stage(nn.Module):
    """Layers of one rank.

    Args:
        model: A name of :data:`PARTS`.
        width: Size of its hidden states.
        length: Tokens of a microbatch.
        num_layers: How many it has.
    """

    def __init__(self, model: str, width: int, length: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(model, width) for _ in range(num_layers))
        self._size = (1, length, width)

    def microbatch(self) -> Tensor:
        """An input that needs a gradient, as all stages but the first have."""
        return torch.empty(self._size, **KIND, requires_grad=True)

    def forward(self, x: Tensor, *, offload: bool = False) -> Tensor:
        for layer in self.layers:
            x = layer(x, offload=offload)
        return x

    @staticmethod
    def backward(y: Tensor) -> None:
        """Run backward with a gradient, as from the next stage."""
        y.backward(torch.empty_like(y))
