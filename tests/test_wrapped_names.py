"""Patterns see through what wraps modules: names as in ``named_modules`` or as in a state dict."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from pp_offload import offload_modules
from pp_offload._common.module_names import matching

pytestmark = pytest.mark.filterwarnings("ignore:FSDP is switching")

MLPS = "layers.*.mlp"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(4, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.Tanh())


class Model(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda module: module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(wrap(Block()) for _ in range(2))


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def fsdp1(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "_checkpoint_wrapped_module": checkpoint_wrapper,
    "_orig_mod": lambda module: torch.compile(module, backend="eager"),
    "_fsdp_wrapped_module": fsdp1,
    "module": DistributedDataParallel,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_are_seen_through(name: str) -> None:
    """A wrapper around a layer, around a module of a group, and around the model."""
    wrap = WRAPPERS[name]
    model = Model(wrap)
    inside = [f"layers.{number}.{name}.mlp" for number in range(2)]
    assert matching(model, MLPS) == matching(model, f"layers.*.{name}.mlp") == inside
    assert matching(model, "layers.*") == ["layers.0", "layers.1"], "the wrapper is the layer"
    stars = matching(model, "layers.*.*")  # a star is no wrapper, but a module called "module"
    assert {f"layers.0.{name}.attn", f"layers.1.{name}.mlp"} < {*stars}
    assert (f"layers.0.{name}" in stars) is (name == "module")
    model = Model()
    for layer in model.layers:
        layer.mlp = wrap(layer.mlp)
    assert matching(model, MLPS) == ["layers.0.mlp", "layers.1.mlp"]
    assert matching(model, f"{MLPS}.{name}") == [f"layers.{n}.mlp.{name}" for n in range(2)]
    assert matching(model, f"{MLPS}.0") == [f"layers.{n}.mlp.{name}.0" for n in range(2)]
    model = wrap(Model())
    inside = [f"{name}.layers.{number}.mlp" for number in range(2)]
    assert matching(model, MLPS) == matching(model, f"{name}.{MLPS}") == inside


@pytest.mark.parametrize("outer", ["_orig_mod", "module"])
def test_names_of_a_state_dict_match(outer: str) -> None:
    """In which some wrappers show, and others, such as checkpoints, do not."""
    model = WRAPPERS[outer](Model(checkpoint_wrapper))
    inside = [f"{outer}.layers.{n}._checkpoint_wrapped_module.mlp" for n in range(2)]
    assert matching(model, f"{outer}.{MLPS}") == matching(model, MLPS) == inside


def test_two_spellings_of_one_module_are_two_groups_which_is_refused() -> None:
    model = Model(checkpoint_wrapper)
    with pytest.raises(ValueError, match="is to be group 'b' and is group 'a' already"):
        offload_modules(model, {"a": MLPS, "b": "layers.*._checkpoint_wrapped_module.mlp"})
