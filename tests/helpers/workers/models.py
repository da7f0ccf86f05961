"""A stage of two blocks, and layers that exchange activations between ranks in their forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 16
HEADS = 4


class Block(nn.Module):
    """A residual block with a part to offload."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Stage(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.children():
            x = layer(x)
        return x


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
    """Sends to the next rank; backward sends gradients the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: int = 1) -> Tensor:
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
        return Pass.apply(grads[0], -ctx.step)


class Ring(nn.Module):
    """Context parallel: a rank has a part of each sequence, and passes keys and values on."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, HEADS, -1).unbind(1)
        total, weights = torch.zeros_like(q), torch.zeros(len(q), HEADS, 1)
        for _ in range(dist.get_world_size()):
            scores = torch.einsum("qhd,khd->qhk", q, k).tanh().exp()
            total = total + torch.einsum("qhk,khd->qhd", scores, v)
            weights = weights + scores.sum(-1, keepdim=True)
            k, v = Pass.apply(k), Pass.apply(v)
        return self.out((total / weights).reshape(x.shape))


class Experts(nn.Module):
    """Expert parallel: each token goes to the rank of its expert, and comes back."""

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
