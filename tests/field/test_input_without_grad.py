"""F48: a first group whose input needs no grad is right, and prefetch keeps up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager

pytestmark = pytest.mark.field("F48")


class Model(nn.Module):
    """Integer tokens, an embedding, and three layers of two groups."""

    def __init__(self, kind: str, is_on: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.is_on = is_on
        self.is_inside = kind == "first stage on integers"
        self.embedding = nn.Embedding(11, 6)
        self.embedding.requires_grad_(self.is_inside)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.adapters = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(6))
        if kind == "LoRA":
            self.layers.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens if self.is_inside else self.embedding(tokens)
        for number, (layer, adapter) in enumerate(zip(self.layers, self.adapters, strict=True)):
            name = "ab"[number % 2]
            with off_interface(self.is_on, x, name) as x:
                if not x.is_floating_point():
                    x = self.embedding(x)
                y = torch.tanh(layer(x)) + adapter(x).sin()
            x = off_interface.group_commit(y, name=name) if self.is_on else y
        return x


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["frozen embedding", "first stage on integers", "LoRA"])
@pytest.mark.parametrize("in_flight", [1, 4])
def test_input_without_grad(manager: PipelineOffloadManager, kind: str, in_flight: int) -> None:
    device = manager.backend.device
    on, off = (Model(kind, is_on).to(device) for is_on in (True, False))

    def run(model: Model, step: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(step)
        waiting: list[Tensor] = []
        results: list[Tensor] = []
        if model.is_on:
            off_interface.reset()
        for _ in range(6):
            if model.is_on:
                off_interface.init_chunk_handler(None, None, 1)
            tokens = torch.randint(11, (5,), generator=generator).to(device)
            waiting.append(model(tokens).square().mean())
            if len(waiting) == in_flight:
                waiting[0].backward()
                results.append(waiting.pop(0).detach())
        while waiting:
            waiting[0].backward()
            results.append(waiting.pop(0).detach())
        results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return results

    steady = 0
    for step in range(4):
        assert same_bits(run(on, step), run(off, step)), step
        assert_idle(manager)
        if step == 1:
            steady = manager.statistics().on_demand_reloads
    assert manager.statistics().on_demand_reloads == steady
    assert manager.statistics().prefetched_reloads + manager.statistics().taken_back > 0
