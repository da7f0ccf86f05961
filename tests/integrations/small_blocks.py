"""A model for other libraries' loops, its data, and what the tests of these loops offload."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pp_offload import OffloadConfig

WIDTH = 12
ALL: dict[str, Any] = {"min_offload_size": 1, "max_fwd_stash_size": 2}
GROUPS: dict[str, Any] = {
    "groups": {"mlp": "layers.*.mlp"},
    "config": OffloadConfig(min_offloaded_tensor_size=1),
}
PRODUCTS = {"activations": ALL, "groups": GROUPS}
"""Options of each library's ``ActivationOffload``."""


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


def batches(num: int) -> DataLoader:
    """Of four rows each, the same every time."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num * 4, WIDTH, generator=generator)
    target = torch.randint(4, (num * 4,), generator=generator)
    return DataLoader(TensorDataset(x, target), batch_size=4)
