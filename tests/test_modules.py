"""offload_modules: groups by module name, on a model nobody edited."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.toy import same_bits
from torch import Tensor, nn

from pp_offload import (
    FineGrainedActivationOffloadingInterface as off_interface,
)
from pp_offload import PipelineOffloadManager, offload_modules


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, num: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(num))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_net(manager: PipelineOffloadManager) -> Net:
    torch.manual_seed(5)
    return Net().to(manager.backend.device)


def step(model: nn.Module, manager: PipelineOffloadManager, *, chunk: bool = True) -> list[Tensor]:
    """Output and all gradients of one microbatch."""
    if chunk:
        off_interface.reset()
        off_interface.init_chunk_handler(None, None, 1)
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(5, 8, generator=generator).to(manager.backend.device).requires_grad_()
    out = model(x)
    out.square().mean().backward()
    assert x.grad is not None
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [out.detach(), x.grad, *grads]


def num_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


GROUPS = {"mlp": "layers.*.mlp", "core_attn": "layers.*.attn"}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layers.*.mlp", ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"]),
        ("layers.[01].attn", ["layers.0.attn", "layers.1.attn"]),
        ("layers.?.mlp.0", ["layers.0.mlp.0", "layers.1.mlp.0", "layers.2.mlp.0"]),
        (["head", "layers.0.mlp"], ["layers.0.mlp", "head"]),
    ],
)
def test_a_star_stands_for_one_part(pattern: Any, expected: list[str]) -> None:
    with offload_modules(Net(), {"group": pattern}) as handle:
        assert handle.modules == {"group": expected}


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("layers.*.mpl", "layers.0.mlp"),
        ("layers.*.MLP", "layers"),
    ],
)
def test_a_pattern_without_a_match_is_an_error_with_near_names(pattern: str, near: str) -> None:
    net = Net()
    with pytest.raises(ValueError) as error:
        offload_modules(net, {"ok": "head", "wrong": pattern})
    message = str(error.value)
    assert f"'{pattern}'" in message
    assert near in message
    assert "expected" in message
    assert num_hooks(net) == 0


def test_remove_restores_the_model(manager: PipelineOffloadManager) -> None:
    net = make_net(manager)
    expected = step(net, manager, chunk=False)
    handle = offload_modules(net, GROUPS)
    assert num_hooks(net) > 0
    handle.remove()
    handle.remove()
    assert num_hooks(net) == 0
    assert same_bits(step(net, manager, chunk=False), expected)
    assert manager.statistics().bytes_offloaded == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_module_that_takes_no_hooks_leaves_the_model_as_it_was(
    manager: PipelineOffloadManager,
) -> None:
    scripted = torch.jit.script(nn.Linear(8, 8))
    model = nn.Sequential(nn.Linear(8, 8), scripted).to(manager.backend.device)
    expected = step(model, manager, chunk=False)
    with pytest.raises(RuntimeError, match="register_forward_pre_hook is not supported"):
        offload_modules(model, {"a": ["0", "1"]})
    assert num_hooks(model) == 0
    with offload_modules(model, {"a": "0"}):
        assert same_bits(step(model, manager), expected)


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("way", COPIED)
def test_removing_the_handle_frees_a_copy_too(manager: PipelineOffloadManager, way: str) -> None:
    net = make_net(manager)
    expected, num = step(net, manager, chunk=False), num_hooks(net)
    handle = offload_modules(net, GROUPS)
    twin = COPIED[way](net)
    handle.remove()
    assert same_bits(step(twin, manager, chunk=False), expected)
    assert manager.statistics().bytes_offloaded == 0
    with offload_modules(twin, {"layer": "layers.*", **GROUPS}):
        assert same_bits(step(twin, manager), expected)
        groups = manager.cur_forward_chunk().groups
        assert [group.name for group in groups] == ["layer", "core_attn", "mlp"] * 3
    assert num_hooks(twin) == num, "hooks that came with the copy are off it, too"


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.arange(40.0).view(5, 8))
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()) * self.scale


@pytest.mark.parametrize("copied", [lambda net: net, copy.deepcopy])
def test_parameters_and_buffers_stay(manager: PipelineOffloadManager, copied: Any) -> None:
    net = nn.Sequential(Scale()).to(manager.backend.device)
    offload_modules(net, {"mlp": "0"})
    step(copied(net), manager)
    nbytes = manager.statistics().bytes_offloaded
    assert nbytes == 5 * 8 * 4, "only the input is an activation"
