"""Calls as they are written for other libraries do here what they do there.

What these libraries' functions take is written out below, so that the calls are tested without
them. Where one is installed, what is written is compared with it.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from helpers.toy import make_model, same_bits
from torch import Tensor, nn

from pp_offload import (
    ActivationCheckpointedModelConfig,
    ActivationCheckpointing,
    FullACParams,
    get_act_offloading_ctx_manager,
    get_lora_act_offloading_ctx_manager,
)

REQUIRED = inspect.Parameter.empty

SIZES = {"min_offload_size": 1024, "max_fwd_stash_size": 5}
STREAMS = {"use_pin_memory": True, "use_streams": True}

TRL = "trl.models.activation_offloading"
TORCHTUNE = "torchtune.training"
FAIRSCALE = "fairscale.experimental.nn.offload"
MODALITIES = "modalities.training.activation_checkpointing.activation_checkpointing"

TAKEN: Mapping[tuple[str, str], Mapping[str, Any]] = {
    (TRL, "OffloadActivations"): {**STREAMS, **SIZES},
    (TRL, "NoOpManager"): {},
    (TRL, "get_act_offloading_ctx_manager"): {
        "model": REQUIRED,
        **STREAMS,
        **SIZES,
        "warn_if_no_head": True,
    },
    (TORCHTUNE, "OffloadActivations"): {**STREAMS, **SIZES},
    (TORCHTUNE, "NoOpManager"): {},
    (TORCHTUNE, "get_act_offloading_ctx_manager"): {
        "model": REQUIRED,
        "enable_activation_offloading": REQUIRED,
    },
    (FAIRSCALE, "OffloadModel"): {
        "model": REQUIRED,
        "device": REQUIRED,
        "offload_device": torch.device("cpu"),
        "num_slices": 3,
        "checkpoint_activation": False,
        "num_microbatches": 1,
    },
    (MODALITIES, "ActivationCheckpointing.apply_activation_checkpointing_"): {
        "ac_variant": REQUIRED,
        "layers_fqn": REQUIRED,
        "model": REQUIRED,
        "ac_fun_params": REQUIRED,
    },
    (MODALITIES, "apply_activation_checkpointing_fsdp1_inplace"): {
        "model": REQUIRED,
        "activation_checkpointing_modules": REQUIRED,
    },
}
"""Parameters and their defaults, by library and name."""

IDS = [f"{module.partition('.')[0]} {name}" for module, name in TAKEN]


def find(owner: Any, name: str) -> Callable[..., Any]:
    for part in name.split("."):
        owner = getattr(owner, part)
    return owner


@pytest.mark.parametrize(("module", "name"), TAKEN, ids=IDS)
def test_what_is_written_here_is_what_they_take(module: str, name: str) -> None:
    theirs = find(pytest.importorskip(module, exc_type=ImportError), name)
    parameters = inspect.signature(theirs).parameters
    assert {p.name: p.default for p in parameters.values()} == TAKEN[module, name]


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Of ours, with the options that one of them hands on."""
    options = dict(inspect.signature(function).parameters)
    if options.pop("options", None):
        options = {**parameters(get_lora_act_offloading_ctx_manager), **options}
    return options


@pytest.mark.parametrize(("module", "name"), TAKEN, ids=IDS)
def test_what_they_take_is_taken_here_with_the_same_default(module: str, name: str) -> None:
    package = "pp_offload.checkpointing" if module == MODALITIES else "pp_offload"
    ours = parameters(find(importlib.import_module(package), name))
    taken = TAKEN[module, name]
    assert taken.keys() <= ours.keys()
    defaults = {option: value for option, value in taken.items() if value is not REQUIRED}
    assert {option: ours[option].default for option in defaults} == defaults


class Decoder(nn.Module):
    """Layers in a ModuleDict, and a head."""

    def __init__(self) -> None:
        super().__init__()
        layers = make_model(layers=3, groups=())
        self.layers = nn.ModuleDict({str(n): layer for n, layer in enumerate(layers)})
        torch.manual_seed(0)
        self.lm_head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(x)


def step(model: nn.Module, context: Any = None) -> list[Tensor]:
    x = torch.linspace(-1, 1, 64 * 8).view(64, 8)
    with context or torch.enable_grad():
        loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    "make",
    [
        lambda model: get_act_offloading_ctx_manager(model=model, **STREAMS, **SIZES),
        lambda model: get_act_offloading_ctx_manager(model, True),
        lambda model: get_lora_act_offloading_ctx_manager(model, use_streams=True),
    ],
    ids=["TRL", "torchtune", "axolotl"],
)
def test_contexts(make: Callable[[nn.Module], Any]) -> None:
    """As these libraries make a context."""
    expected = step(Decoder())
    model = Decoder()
    context = make(model)
    context.update_model_params(model)
    assert same_bits(step(model, context), expected)
    assert context.statistics().bytes_offloaded > 0


Written = enum.Enum("Written", {"FULL": "full_activation_checkpointing"})
"""A variant of modalities' own, known by its value."""

ByName = enum.Enum("ByName", ["SELECTIVE_LAYER_ACTIVATION_CHECKPOINTING"])
"""One that has a number for its value."""

EVERY_OP = {"save_ops_keys": list(ActivationCheckpointing.SAVE_DICT)}


@pytest.mark.parametrize(
    ("variant", "options", "num_layers"),
    [
        (*Written, types.SimpleNamespace(), 3),
        (*ByName, types.SimpleNamespace(ac_freq=2), 1),
        ("selective_op_activation_checkpointing", EVERY_OP, 3),
    ],
)
def test_checkpoints_as_modalities_asks_for_them(
    variant: Any, options: Any, num_layers: int
) -> None:
    """By its enum or one like it, or by a word, with options in a dict."""
    expected = step(Decoder())
    model = Decoder()
    recompute = ActivationCheckpointing.apply_activation_checkpointing_(
        ac_variant=variant, layers_fqn="layers", model=model, ac_fun_params=options
    )
    assert same_bits(step(model), expected)
    assert recompute.counts.recomputed_calls == num_layers
    assert ActivationCheckpointedModelConfig.FullACParams is FullACParams
