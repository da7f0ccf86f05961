"""offload_modules: groups by module name, on a model nobody edited, through what wraps modules."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.toy import batches, make_model, moved, num_hooks, run_step, same_bits
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from pp_offload import PipelineOffloadManager, offload_modules
from pp_offload.modules import matching


def step(model: nn.Module, manager: PipelineOffloadManager, *, chunk: bool = True) -> list[Tensor]:
    """Loss and all gradients of one microbatch."""
    inputs = [x.to(manager.backend.device) for x in batches(1)]
    return run_step(model, inputs, offload=chunk)


GROUPS = {"mlp": "*.up", "core_attn": "*.mix"}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*", ["0", "1", "2"]),
        ("*.up", ["0.up", "1.up", "2.up"]),
        ("[01].mix", ["0.mix", "1.mix"]),
        ("?.up", ["0.up", "1.up", "2.up"]),
        (["2", "0.mix"], ["0.mix", "2"]),
    ],
)
def test_a_star_stands_for_one_part(pattern: Any, expected: list[str]) -> None:
    with offload_modules(make_model(groups=()), {"group": pattern}) as handle:
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


@pytest.mark.parametrize(
    ("copied", "nbytes"),
    [(copy.deepcopy, 2 * 3 * 5 * 8 * 4), (lambda net: pickle.loads(pickle.dumps(net)), 0)],
)
def test_removing_the_handle_frees_a_copy_too(
    manager: PipelineOffloadManager, copied: Any, nbytes: int
) -> None:
    """A copy has the groups until then, and sends no parameter; what was pickled has none."""
    net = moved(make_model(groups=()), manager.backend.device)
    expected, num = step(net, manager, chunk=False), num_hooks(net)
    handle = offload_modules(net, GROUPS)
    twin = copied(net)
    step(twin, manager)
    assert manager.statistics().bytes_offloaded == nbytes, "the inputs of modules"
    for _ in range(2):
        handle.remove()
    assert num_hooks(net) == num
    assert same_bits(step(twin, manager, chunk=False), expected)
    assert manager.statistics().bytes_offloaded == nbytes
    with offload_modules(twin, {"layer": "*", **GROUPS}):
        assert same_bits(step(twin, manager), expected)
        groups = manager.cur_forward_chunk().groups
        assert [group.name for group in groups] == ["layer", "core_attn", "mlp"] * 3
    assert num_hooks(twin) == num, "hooks that came with the copy are off it, too"


def test_removing_the_handle_returns_idle_host_memory(manager: PipelineOffloadManager) -> None:
    """Or it would count in the budget of whatever offloads next."""
    model = make_model(groups=(), device=str(manager.backend.device))
    with offload_modules(model, GROUPS):
        step(model, manager)
        assert manager.statistics().host_bytes_reserved > 0
    assert manager.statistics().host_bytes_reserved == 0


def test_the_buffer_of_a_copy_stays(manager: PipelineOffloadManager) -> None:
    net = nn.Sequential(nn.BatchNorm1d(8).eval())
    offload_modules(net, {"norm": "0"})
    step(copy.deepcopy(net).to(manager.backend.device), manager)
    assert manager.statistics().bytes_offloaded == 5 * 8 * 4, "the input alone"


# Wrappers: names are those of named_modules or of a state dict

UPS = "*.up"


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
    model = nn.Sequential(*map(wrap, make_model(groups=())))
    inside = [f"{number}.{name}.up" for number in range(3)]
    assert matching(model, UPS) == matching(model, f"*.{name}.up") == inside
    assert matching(model, "*") == ["0", "1", "2"], "the wrappers"
    stars = matching(model, "*.*")  # a star is no wrapper, but a module called "module"
    assert {f"0.{name}.mix", f"1.{name}.up"} < {*stars}
    assert (f"0.{name}" in stars) is (name == "module")
    model = make_model(groups=())
    for layer in model:
        layer.up = wrap(nn.Sequential(layer.up))
    for ending in ("", f".{name}"):
        outside = [f"{number}.up{ending}" for number in range(3)]
        assert matching(model, UPS + ending) == outside
    assert matching(model, f"{UPS}.0") == [f"{number}.up.{name}.0" for number in range(3)]
    model = wrap(make_model(groups=()))
    inside = [f"{name}.{number}.up" for number in range(3)]
    assert matching(model, UPS) == matching(model, f"{name}.{UPS}") == inside


@pytest.mark.parametrize("outer", ["_orig_mod", "module"])
def test_names_of_a_state_dict_match(outer: str, one_rank: None) -> None:
    """In which some wrappers show, and others, such as checkpoints, do not."""
    model = WRAPPERS[outer](nn.Sequential(*map(checkpoint_wrapper, make_model(groups=()))))
    inside = [f"{outer}.{number}._checkpoint_wrapped_module.up" for number in range(3)]
    assert matching(model, f"{outer}.{UPS}") == matching(model, UPS) == inside


def test_two_spellings_of_one_module_are_two_groups_which_is_refused() -> None:
    model = nn.Sequential(*map(checkpoint_wrapper, make_model(groups=())))
    with pytest.raises(ValueError, match="is to be group 'b' and is group 'a' already"):
        offload_modules(model, {"a": UPS, "b": "*._checkpoint_wrapped_module.up"})
