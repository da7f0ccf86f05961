"""A profile says what a count without tapes says: bytes by hooks, memory and time by the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.virtual_models import KIND, Stage
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
)

from pp_offload import OffloadConfig, recompute_layers, use_backend
from pp_offload.plan import Profile, profile, profile_table, record
from pp_offload.simulate import DEVICES, Modules, PipelineOrder, VirtualBackend

WIDTH, LENGTH, NUM_LAYERS = 4096, 8192, 3
H100 = DEVICES["H100"]
AT_ONCE = replace(H100, launch_s=0.0)
GROUPS = {"attn": "layers.*.attn", "mlp": "layers.*.mlp"}


def square(y: Tensor) -> Tensor:
    return y.float().square().mean()


def profiled(
    stages: list[Any], example: Tensor, config: OffloadConfig | None = None, **options: Any
) -> Profile:
    """That of a rank for each stage."""
    work = Modules(stages, example=example, loss_fn=square, **options)
    sizes = {"num_ranks": len(stages), "num_stages": len(stages)}
    order = PipelineOrder(Schedule1F1B, num_microbatches=len(stages), **sizes)
    return profile(record(order, work, H100, config), H100)


@pytest.fixture(scope="module")
def llama() -> Stage:
    return Stage("llama", WIDTH, LENGTH, NUM_LAYERS)


@pytest.fixture(scope="module")
def found(llama: Stage) -> Profile:
    """Of two stages."""
    stages = [llama, Stage("llama", WIDTH, LENGTH, NUM_LAYERS)]
    example = llama.microbatch().detach()
    config = OffloadConfig(rematerialize="none")
    return profiled(stages, example, config, groups=GROUPS, layers="layers.*")


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """What autograd keeps of a forward, each storage once, without parameters and small tensors."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        is_parameter = any(tensor is one for one in module.parameters())
        whole = tensor if tensor._base is None else tensor._base
        is_parameter |= any(whole is one for one in module.parameters())
        if not is_parameter and tensor.numel() >= OffloadConfig().min_offloaded_tensor_size:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with (
        use_backend(VirtualBackend(H100)),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one),
    ):
        y = module(x)
        nbytes = sum(one.untyped_storage().nbytes() for one in kept.values())
        del y
    return nbytes


@contextmanager
def microbatch(stage: Stage) -> Iterator[tuple[VirtualBackend, Callable[[], Tensor]]]:
    """A device on which the stage's parameters are, and its forward."""
    backend = VirtualBackend(AT_ONCE, is_blocking=True)
    with use_backend(backend):
        for one in stage.parameters():
            backend.memory.see(one.untyped_storage())
        x = stage.microbatch()
        yield backend, lambda: stage(x)
        stage.zero_grad()


def test_a_group_saves_what_hooks_see(llama: Stage, found: Profile) -> None:
    """41 bytes a token and unit of the width: 9 of attention, 32 of a SwiGLU of 3.5 widths."""
    layer = llama.layers[1]
    for number, part in enumerate((layer.attn, layer.mlp)):
        assert found.groups[2 + number].nbytes == saved_bytes(part, llama.microbatch())
    assert [one.nbytes / (WIDTH * LENGTH) for one in found.groups] == [9, 32] * 6


def alone_ms(layer: nn.Module, x: Tensor) -> tuple[float, float]:
    """Of a forward, and of a backward that is not the first."""
    backend = VirtualBackend(AT_ONCE)
    with use_backend(backend):
        for _ in range(2):
            begin_s = backend.compute.busy_s
            y = layer(x.detach().requires_grad_())
            between_s = backend.compute.busy_s
            y.backward(torch.empty_like(y))
        end_s = backend.compute.busy_s
    layer.zero_grad()
    return (between_s - begin_s) * 1e3, (end_s - between_s) * 1e3


def test_recomputation_costs_and_frees_what_it_does_on_the_device(
    llama: Stage, found: Profile
) -> None:
    figures = []
    for names in ([], [f"layers.{i}" for i in range(NUM_LAYERS)]):
        with recompute_layers(llama, names), microbatch(llama) as (backend, forward):
            begin = backend.memory.live_bytes
            y = forward()
            held, forward_s = backend.memory.live_bytes - begin, backend.compute.busy_s
            Stage.backward(y)
            figures.append((held, backend.compute.busy_s - forward_s))
    (held, backward_s), (held_less, longer_s) = figures
    for stage in found.stages:
        assert stage.num_layers == NUM_LAYERS
        assert stage.recompute_frees_bytes == (held - held_less) / NUM_LAYERS
        expected_ms = (longer_s - backward_s) / NUM_LAYERS * 1e3
        assert stage.recompute_ms == pytest.approx(expected_ms, rel=1e-9)


class Both(nn.Module):
    """A part in the other one, which saves what that has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.outer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        return self.outer(y) + self.inner(y)


def test_groups_in_groups_and_what_they_share() -> None:
    stages = [nn.Sequential(nn.Tanh(), Both()).to("meta", torch.bfloat16)]
    example = torch.empty(64, 64, **KIND)
    config = OffloadConfig(min_offloaded_tensor_size=1)
    groups = {"outer": "1", "inner": "1.inner"}
    found = profiled(stages, example, config, groups=groups)
    outer, inner = found.groups
    assert (outer.name, outer.shared_with) == ("outer", ("inner",))
    assert (inner.name, inner.shared_with) == ("inner", ("outer",))
    whole = profiled(stages, example, config, groups={"outer": "1"})
    together_ms = outer.forward_ms + inner.forward_ms
    assert together_ms == pytest.approx(whole.groups[0].forward_ms, rel=1e-9)
    assert whole.groups[0].shared_with == ()
    alone = alone_ms(stages[0][1].inner, example)
    assert inner.forward_ms == pytest.approx(alone[0], rel=1e-9)
    assert "shares with inner" in profile_table(found)


def test_the_tables(found: Profile) -> None:
    rows = profile_table(found).splitlines()
    assert rows[3].split() == "mlp 0-1 6 1024.0 5.35 11.13 21.53 191.5".split()
    assert "The link carries 47.7" in profile_table(found)
    stages = rows[next(i for i, row in enumerate(rows) if row.startswith("stage")) :]
    assert stages[2].split() == "0 0 1.47 3.85 3.91 0.55 22.89 48.35 5.94 1.22".split()
