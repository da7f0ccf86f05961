"""A small residual net whose parts are groups, and steps of it in pipeline orders.

net = Net()
train(net, inputs(4), is_on=True, ahead=2)    # 1F1B with two forwards before the first backward
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from helpers.sessions import begin_microbatch, drawn, gradients, group
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface

WIDTH = 8
ROWS = 5


class Net(nn.Module):
    """Layers of named parts; the same weights for the same seed."""

    def __init__(self, names: Sequence[str] = ("attn", "mlp"), layers: int = 2, seed: int = 1):
        super().__init__()
        self.is_on = True
        self.names = [name for _ in range(layers) for name in names]
        weights = [drawn(WIDTH, WIDTH, seed=seed * 100 + n) / 2 for n in range(len(self.names))]
        self.weights = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> Tensor:
        for name, weight in zip(self.names, self.weights, strict=True):
            x = x + group(x, lambda h, w=weight: torch.tanh(h @ w).sin(), self.is_on, name)
        return x


def sines(h: Tensor) -> Tensor:
    return h.mul(2).sin().tanh()


class Block(nn.Module):
    """A layer that asks for a checkpoint, if it is to have one, as those of Hugging Face do."""

    gradient_checkpointing = False

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def compute(self, x: Tensor, mask: Tensor | float = 1.0) -> Tensor:
        return x + self.dropout(self.down(torch.sigmoid(self.up(x * mask))))

    def forward(self, x: Tensor, *mask: Tensor) -> Tensor:
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(self.compute, x, *mask)
        return self.compute(x, *mask)


def inputs(num: int, *, step: int = 0, rows: int = ROWS) -> list[Tensor]:
    """Of one step."""
    return [drawn(rows, WIDTH, seed=1000 * step + n) for n in range(num)]


def train(
    stages: nn.Module | Sequence[nn.Module],
    xs: Sequence[Tensor],
    is_on: bool,
    *,
    ahead: int = 1,
    last_first: bool = False,
) -> list[Tensor]:
    """One step over virtual stages; losses, gradients of inputs and of weights.

    So many microbatches go forward ``ahead`` of the first backward, which takes the oldest of them,
    or with ``last_first`` the latest.
    """
    nets = [stages] if isinstance(stages, nn.Module) else list(stages)
    for net in nets:
        net.is_on = is_on  # type: ignore[assignment]
    if is_on:
        off_interface.reset()
    results: list[Tensor] = []
    waiting: list[tuple[list[Tensor], list[Tensor]]] = []

    def backward() -> None:
        leaves, outputs = waiting.pop(-1 if last_first else 0)
        gradient = None
        for leaf, y in zip(reversed(leaves), reversed(outputs), strict=True):
            y.backward(gradient)
            gradient = leaf.grad
        results.extend([outputs[-1].detach(), *gradients(leaves[0])])

    for x in xs:
        leaves: list[Tensor] = []
        outputs: list[Tensor] = []
        for number, net in enumerate(nets):
            begin_microbatch(is_on, len(nets), number)
            leaves.append(x.detach().clone().requires_grad_())
            x = net(leaves[-1])
            if number == len(nets) - 1:
                x = x.square().mean()
            outputs.append(x)
        waiting.append((leaves, outputs))
        del leaves, outputs, x
        if len(waiting) >= ahead:
            backward()
    while waiting:
        backward()
    return results + gradients(*(p for net in nets for p in net.parameters()))
