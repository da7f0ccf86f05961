"""Blocks that models of other libraries' loops are made of in tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 12


class Block(nn.Module):
    """Residual, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.mlp(x))


class Blocks(nn.Module):
    """A few of them, and a head; the same weights every time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
