"""Pipelines on the engine alone: the same bits as without it, on every device."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from conftest import make_backend
from lines import Line, same
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore")


class Layer(nn.Module):
    """Views of one storage, a shared table, an operator that saves twice, a slice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def attend(self, x: Tensor, table: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = torch.softmax((q * table) @ k.transpose(-1, -2), dim=-1)
        return x + scores @ v

    def feed(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(self.out(x))
        return x + torch.cat([hidden[..., 1:] * hidden[..., :-1], hidden[..., :1]], dim=-1) * x


def run(
    layers: nn.ModuleList, sizes: list[int], num_warmup: int, line: Line | None
) -> list[Tensor]:
    """A 1F1B step; gradients of parameters and inputs, and losses."""
    layers.zero_grad()
    torch.manual_seed(len(sizes))
    inputs = [torch.randn(2, size, 8, requires_grad=True) for size in sizes]
    table = torch.randn(8)
    losses: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        def part(name: str, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
            return function(*args) if line is None else line.group(name, function, *args)

        with nullcontext() if line is None else line.chunk():
            wide = table.expand(2, x.shape[1], 8).contiguous()
            for layer in layers:
                assert isinstance(layer, Layer)
                x = part("attn", layer.attend, x, wide)
                x = part("mlp", layer.feed, x)
        return x.square().mean()

    waiting: list[Tensor] = []
    for x in inputs:
        waiting.append(forward(x))
        if len(waiting) > num_warmup:
            loss = waiting.pop(0)
            loss.backward()
            losses.append(loss.detach())
    for loss in waiting:
        loss.backward()
        losses.append(loss.detach())
    waiting.clear()
    grads = [p.grad for p in layers.parameters()] + [x.grad for x in inputs]
    return losses + [g.clone() for g in grads if g is not None]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["late", "eager", "random", "cpu"])
@pytest.mark.parametrize("options", [{}, {"prefetch_bytes": 700, "max_in_flight_bytes": 0}])
def test_steps_have_the_same_bits_and_leave_nothing(
    name: str, options: dict[str, int], seed: int
) -> None:
    rng = random.Random(seed)
    backend = make_backend(name, seed)
    torch.manual_seed(0)
    layers = nn.ModuleList([Layer(8) for _ in range(3)])
    expected = []
    line = Line(backend, **options)
    for parameter in layers.parameters():
        line.engine.eligibility.kept.add(parameter)
    for _ in range(4):
        sizes = [rng.choice([3, 5, 9]) for _ in range(rng.randint(2, 5))]
        num_warmup = rng.randint(0, 3)
        expected = run(layers, sizes, num_warmup, None)
        with backend.activate():
            line.reset()
            actual = run(layers, sizes, num_warmup, line)
        assert same(actual, expected)
        line.assert_clean()
    assert line.engine.mover.counts.bytes_offloaded > 0
    del line
    gc.collect()  # its host memory counts in the budget of the process, which other tests bound
