"""A small transformer that calls the offload as the call sites of Megatron-LM's main do.

Where a group begins and where it is closed, what is named to be released and which commits may be
delayed is written after transformer_layer.py, attention.py and experts.py; what is called once a
microbatch after gpt_model.py, and once a step after schedules.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from helpers.sessions import gradients
from torch import Tensor, nn
from torch.nn import functional

from pp_offload import PipelineOffloadManager
from pp_offload.compat.megatron import FineGrainedActivationOffloadingInterface as off_interface

WIDTH = 16
GROUPS = ("attn_norm", "core_attn", "expert_fc1", "moe_act")


class Layer(nn.Module):
    """Attention and experts; no group is on without offload."""

    def __init__(self, is_on: bool) -> None:
        super().__init__()
        self.is_on = is_on
        self.may_delay = False
        self.attn_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.attention(x))

    def attention(self, x: Tensor) -> Tensor:
        residual = x
        norm_group = off_interface(self.is_on, x, "attn_norm")
        with norm_group as x:
            normed = self.attn_norm(x)
        query, key, value = self.qkv(normed).chunk(3, dim=-1)
        group = off_interface(self.is_on and self.training, query, "core_attn")
        with group as query:
            scores = torch.softmax(query @ key.transpose(-1, -2), dim=-1)
            attended = scores @ value
        attended = group.group_offload(attended, forced_released_tensors=[query, key, value])
        return norm_group.group_offload(attended + residual, forced_released_tensors=[residual])

    def experts(self, x: Tensor) -> Tensor:
        group = off_interface(self.is_on, x, "expert_fc1")
        with group as x:
            hidden = self.fc1(x)
        hidden = group.group_offload(
            hidden, forced_released_tensors=[x], delay_offload=self.may_delay
        )
        group = off_interface(self.is_on, hidden, "moe_act")
        with group as hidden:
            gate, up = hidden.chunk(2, dim=-1)
            activated = functional.silu(gate) * up
        return group.group_offload(
            self.fc2(activated), forced_released_tensors=[hidden], delay_offload=self.may_delay
        )

    def replay(self, x: Tensor) -> Tensor:
        """As a layer of which a graph has the attention: what earlier layers delayed comes next."""
        if self.may_delay:
            off_interface.enter_replay()
        try:
            x = self.attention(x)
            if self.may_delay:
                off_interface.flush_delayed_groups()
            return self.experts(x)
        finally:
            if self.may_delay:
                off_interface.exit_replay()


class Model(nn.Module):
    """Layers; each forward is a microbatch's, and begins its chunk."""

    def __init__(self, device: torch.device, is_on: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer(is_on) for _ in range(2)).to(device)
        self.is_on = is_on
        self.is_replaying = False
        self.options: dict[str, Any] = {"pp_rank": 0, "min_offloaded_tensor_size": 1}

    def forward(self, x: Tensor) -> Tensor:
        if self.is_on:
            off_interface.init_chunk_handler(**self.options)
            for parameter in self.parameters():
                off_interface.mark_not_offload(parameter)
        for layer in self.layers:
            x = layer.replay(x) if self.is_replaying else layer(x)
        return x

    def delay(self) -> None:
        """From now on layers are replayed, with delayed commits."""
        self.is_replaying = True
        for layer in self.layers:
            layer.may_delay = True


def models(manager: PipelineOffloadManager, **options: Any) -> tuple[Model, Model]:
    """With offload and without."""
    device = manager.backend.device
    on, off = Model(device), Model(device, is_on=False)
    on.options.update(options)
    return on, off


def batches(device: torch.device, num: int = 4, seed: int = 0) -> list[Tensor]:
    """Inputs of a step."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, WIDTH, generator=generator).to(device) for _ in range(num)]


def step(model: Model, inputs: Sequence[Tensor]) -> list[Tensor]:
    """1F1B with two forwards ahead: losses, and gradients of inputs and parameters."""
    waiting: list[Tensor] = []
    losses: list[Tensor] = []
    leaves = [x.clone().requires_grad_() for x in inputs]

    def backward() -> None:
        losses.append(waiting.pop(0))
        losses[-1].backward()

    for leaf in leaves:
        waiting.append(model(leaf * 1).square().mean())
        if len(waiting) > 2:
            backward()
    while waiting:
        backward()
    if model.is_on:
        off_interface.reset(process_group=None)
    return [*(loss.detach() for loss in losses), *gradients(*leaves, *model.parameters())]


def begin(most: int | None = None) -> None:
    """A microbatch, with at most so many offloads in flight."""
    off_interface.init_chunk_handler(0, None, None, 1, 0, 1.0, most)


def in_group(
    x: Tensor, compute: Callable[[Tensor], Tensor], name: str = "act", **offload: Any
) -> Tensor:
    """``compute(x)`` as a group that is closed at once."""
    group = off_interface(True, x, name)
    with group as inside:
        y = compute(inside)
    return group.group_offload(y, **offload)
