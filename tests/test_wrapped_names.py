"""Patterns see through what wraps modules: names as in ``named_modules`` or as in a state dict."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from pp_offload import offload_modules
from pp_offload._common.module_names import matching


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(4, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attn(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def fsdp1(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "_checkpoint_wrapped_module": checkpoint_wrapper,
    "_orig_mod": compiled,
    "_fsdp_wrapped_module": fsdp1,
    "module": DistributedDataParallel,
}

MLPS, LAYERS = "layers.*.mlp", "layers.*"


def wrap_layers(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = Model()
    for number, layer in enumerate(model.layers):
        model.layers[number] = wrap(layer)
    return model


def wrap_mlps(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = Model()
    for layer in model.layers:
        layer.mlp = wrap(layer.mlp)
    return model


pytestmark = pytest.mark.filterwarnings("ignore:FSDP is switching")
on_each = pytest.mark.parametrize("name", WRAPPERS)


@on_each
def test_a_wrapped_layer_is_seen_through(name: str) -> None:
    model = wrap_layers(WRAPPERS[name])
    found = [f"layers.{number}.{name}.mlp" for number in range(2)]
    assert matching(model, MLPS) == found
    assert matching(model, f"layers.*.{name}.mlp") == found
    assert matching(model, LAYERS) == ["layers.0", "layers.1"], "the wrapper is the layer"


@on_each
def test_a_wrapped_module_is_the_wrapper(name: str) -> None:
    """Unless what is inside is named."""
    model = wrap_mlps(WRAPPERS[name])
    assert matching(model, MLPS) == ["layers.0.mlp", "layers.1.mlp"]
    assert matching(model, f"{MLPS}.{name}") == [f"layers.{n}.mlp.{name}" for n in range(2)]
    assert matching(model, f"{MLPS}.0") == [f"layers.{n}.mlp.{name}.0" for n in range(2)]


@on_each
def test_a_wrapped_model_is_seen_through(name: str) -> None:
    model = WRAPPERS[name](Model())
    found = [f"{name}.layers.{number}.mlp" for number in range(2)]
    assert matching(model, MLPS) == matching(model, f"{name}.{MLPS}") == found


@pytest.mark.parametrize("outer", ["_orig_mod", "module"])
def test_names_of_a_state_dict_match(outer: str) -> None:
    """In which some wrappers show, and others, such as checkpoints, do not."""
    model = WRAPPERS[outer](wrap_layers(checkpoint_wrapper))
    names = [key for key in model.state_dict() if key.endswith("mlp.0.weight")]
    assert names[0] == f"{outer}.layers.0.mlp.0.weight"
    found = [f"{outer}.layers.{n}._checkpoint_wrapped_module.mlp" for n in range(2)]
    for pattern in (MLPS, f"{outer}.{MLPS}", f"{outer}.layers.*._checkpoint_wrapped_module.mlp"):
        assert matching(model, pattern) == found, pattern


def test_wrappers_in_wrappers_are_seen_through() -> None:
    model = wrap_layers(lambda layer: compiled(checkpoint_wrapper(layer)))
    found = [f"layers.{n}._orig_mod._checkpoint_wrapped_module.mlp" for n in range(2)]
    for pattern in (MLPS, "layers.*._orig_mod.mlp", "layers.*._checkpoint_wrapped_module.mlp"):
        assert matching(model, pattern) == found, pattern
    assert matching(model, LAYERS) == ["layers.0", "layers.1"]


@on_each
def test_a_star_is_no_wrapper(name: str) -> None:
    """Else a wrapped layer would be a group around groups. A user's may be called ``module``."""
    model = wrap_layers(WRAPPERS[name])
    parts = [f"layers.{n}.{name}.{part}" for n in range(2) for part in ("attn", "mlp")]
    wrapped = [f"layers.{n}.{name}" for n in range(2)] if name == "module" else []
    assert sorted(matching(model, "layers.*.*")) == sorted(parts + wrapped)


def test_fully_shard_keeps_names() -> None:
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert matching(model, MLPS) == ["layers.0.mlp", "layers.1.mlp"]


def test_a_module_that_a_user_named_like_a_wrapper_is_one_too() -> None:
    model = nn.Module()
    model.module = Block()
    model.inner = nn.Module()
    model.inner.module = nn.Linear(4, 4)
    assert matching(model, "module") == ["module"]
    assert matching(model, "inner.module") == ["inner.module"]
    assert matching(model, ["module.mlp"]) == matching(model, "mlp") == ["module.mlp"]


def test_two_spellings_of_one_module_are_two_groups_which_is_refused() -> None:
    model = wrap_layers(checkpoint_wrapper)
    with pytest.raises(ValueError, match="is to be group 'b' and is group 'a' already"):
        offload_modules(model, {"a": MLPS, "b": "layers.*._checkpoint_wrapped_module.mlp"})
