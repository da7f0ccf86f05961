"""Layers that exchange activations between ranks in their forward.

``ulysses`` and ``ring`` are context parallel: a rank has a part of each sequence. The first
exchanges sequence for heads, the second passes keys and values on to the next rank. ``experts`` is
expert parallel: each token goes to the rank of its expert, and comes back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.workers.steps import WIDTH

HEADS = 4


class Exchange(torch.autograd.Function):
    """Gives each rank its rows, the first rows to the first; backward gives gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sizes = received, sent
        output = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(output, x.contiguous(), received, sent)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Exchange.apply(grads[0], *ctx.sizes), None, None


class Pass(torch.autograd.Function):
    """Sends to the rank that is ``step`` further; backward sends gradients the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: int) -> Tensor:
        ctx.step, rank, world = step, dist.get_rank(), dist.get_world_size()
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x.contiguous(), (rank + step) % world),
                dist.P2POp(dist.irecv, output, (rank - step) % world),
            ]
        ):
            work.wait()
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Pass.apply(grads[0], -ctx.step), None


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, HEADS, -1).unbind(1)
        return self.out(self.attend(q, k, v).reshape(x.shape))


class Ulysses(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        world, length = dist.get_world_size(), len(q)
        parts = HEADS // world  # heads of a rank, whose tokens are all there

        def to_heads(x: Tensor) -> Tensor:
            x = x.view(length, world, parts, -1).transpose(0, 1).flatten(0, 1)
            return Exchange.apply(x, [length] * world, [length] * world).transpose(0, 1)

        y = nn.functional.scaled_dot_product_attention(*map(to_heads, (q, k, v)))
        y = Exchange.apply(y.transpose(0, 1), [length] * world, [length] * world)
        return y.view(world, length, parts, -1).transpose(0, 1)


class Ring(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        total, weights = torch.zeros_like(q), torch.zeros(len(q), HEADS, 1)
        for _ in range(dist.get_world_size()):
            scores = torch.einsum("qhd,khd->qhk", q, k).tanh().exp()
            total = total + torch.einsum("qhk,khd->qhd", scores, v)
            weights = weights + scores.sum(-1, keepdim=True)
            k, v = Pass.apply(k, 1), Pass.apply(v, 1)
        return total / weights


class Experts(nn.Module):
    """One expert on each rank; how many tokens it gets differs each time."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, dist.get_world_size())
        self.expert = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.indices.argsort(stable=True)
        counts = chosen.indices.bincount(minlength=dist.get_world_size())
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, received = counts.tolist(), theirs.tolist()
        y = Exchange.apply(x[order], sent, received)
        y = Exchange.apply(self.expert(y), received, sent)
        return torch.empty_like(x).index_copy(0, order, y) * chosen.values[:, None]
