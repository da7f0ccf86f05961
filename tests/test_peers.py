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
from helpers.toy import batches, make_model, run_step, same_bits

from pp_offload import (
    ActivationCheckpointedModelConfig,
    ActivationCheckpointing,
    FullACParams,
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
    (TRL, "OffloadActivations.update_model_params"): {"self": REQUIRED, "model": REQUIRED},
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
    expected = run_step(make_model(groups=()), batches(1), offload=False)
    model = make_model(groups=())
    recompute = ActivationCheckpointing.apply_activation_checkpointing_(
        ac_variant=variant, layers_fqn="", model=model, ac_fun_params=options
    )
    assert same_bits(run_step(model, batches(1), offload=False), expected)
    assert recompute.counts.recomputed_calls == num_layers
    assert ActivationCheckpointedModelConfig.FullACParams is FullACParams
