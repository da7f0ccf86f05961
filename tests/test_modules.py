"""offload_modules: groups by module name, on a model nobody edited, through what wraps modules."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.toy import num_hooks, same_bits
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager, offload_modules
from pp_offload._common.module_names import matching


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda module: module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(wrap(Block()) for _ in range(3))
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


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_module_is_refused_and_leaves_the_model_as_it_was(
    manager: PipelineOffloadManager,
) -> None:
    scripted = torch.jit.script(nn.Linear(8, 8))
    model = nn.Sequential(nn.Linear(8, 8), scripted).to(manager.backend.device)
    expected, num = step(model, manager, chunk=False), num_hooks(model)
    with pytest.raises(ValueError, match="module '1' is scripted"):
        offload_modules(model, {"a": ["0", "1"]})
    assert num_hooks(model) == num
    with offload_modules(model, {"a": "0"}):
        assert same_bits(step(model, manager), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_removing_the_handle_frees_a_copy_too(manager: PipelineOffloadManager, copied: Any) -> None:
    net = make_net(manager)
    expected, num = step(net, manager, chunk=False), num_hooks(net)
    handle = offload_modules(net, GROUPS)
    twin = copied(net)
    for _ in range(2):
        handle.remove()
    assert num_hooks(net) == num
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


# Wrappers: names are those of named_modules or of a state dict

MLPS = "layers.*.mlp"


def fsdp1(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "_checkpoint_wrapped_module": checkpoint_wrapper,
    "_orig_mod": lambda module: torch.compile(module, backend="eager"),
    "_fsdp_wrapped_module": fsdp1,
    "module": DistributedDataParallel,
}


@pytest.mark.filterwarnings("ignore:FSDP is switching")
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_are_seen_through(name: str, one_rank: None) -> None:
    """A wrapper around a layer, around a module of a group, and around the model."""
    wrap = WRAPPERS[name]
    model = Net(wrap)
    inside = [f"layers.{number}.{name}.mlp" for number in range(3)]
    assert matching(model, MLPS) == matching(model, f"layers.*.{name}.mlp") == inside
    assert matching(model, "layers.*") == ["layers.0", "layers.1", "layers.2"], "the wrappers"
    stars = matching(model, "layers.*.*")  # a star is no wrapper, but a module called "module"
    assert {f"layers.0.{name}.attn", f"layers.1.{name}.mlp"} < {*stars}
    assert (f"layers.0.{name}" in stars) is (name == "module")
    model = Net()
    for layer in model.layers:
        layer.mlp = wrap(layer.mlp)
    for ending in ("", f".{name}"):
        outside = [f"layers.{number}.mlp{ending}" for number in range(3)]
        assert matching(model, MLPS + ending) == outside
    assert matching(model, f"{MLPS}.0") == [f"layers.{n}.mlp.{name}.0" for n in range(3)]
    model = wrap(Net())
    inside = [f"{name}.layers.{number}.mlp" for number in range(3)]
    assert matching(model, MLPS) == matching(model, f"{name}.{MLPS}") == inside


@pytest.mark.parametrize("outer", ["_orig_mod", "module"])
def test_names_of_a_state_dict_match(outer: str, one_rank: None) -> None:
    """In which some wrappers show, and others, such as checkpoints, do not."""
    model = WRAPPERS[outer](Net(checkpoint_wrapper))
    inside = [f"{outer}.layers.{n}._checkpoint_wrapped_module.mlp" for n in range(3)]
    assert matching(model, f"{outer}.{MLPS}") == matching(model, MLPS) == inside


def test_two_spellings_of_one_module_are_two_groups_which_is_refused() -> None:
    model = Net(checkpoint_wrapper)
    with pytest.raises(ValueError, match="is to be group 'b' and is group 'a' already"):
        offload_modules(model, {"a": MLPS, "b": "layers.*._checkpoint_wrapped_module.mlp"})
