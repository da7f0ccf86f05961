"""Calls as they are written for other libraries do here what they do there.

What these libraries' functions take is written out below, so that the calls are tested without
them. Where one is installed, what is written is compared with it.
"""

from __future__ import annotations

import enum
import inspect
import types
from pkgutil import resolve_name
from typing import Any

import pytest
from helpers.toy import batches, make_model, run_step, same_bits

from pp_offload import ActivationCheckpointedModelConfig, ActivationCheckpointing, FullACParams

TRL = "trl.models.activation_offloading"
TORCHTUNE = "torchtune.training"
FAIRSCALE = "fairscale.experimental.nn.offload"
MODALITIES = "modalities.training.activation_checkpointing.activation_checkpointing"

CONTEXT = "use_pin_memory=True, use_streams=True, min_offload_size=1024, max_fwd_stash_size=5"
TAKEN = {
    (TRL, "OffloadActivations"): CONTEXT,
    (TRL, "OffloadActivations.update_model_params"): "self, model",
    (TRL, "NoOpManager"): "",
    (TRL, "get_act_offloading_ctx_manager"): f"model, {CONTEXT}, warn_if_no_head=True",
    (TORCHTUNE, "OffloadActivations"): CONTEXT,
    (TORCHTUNE, "NoOpManager"): "",
    (TORCHTUNE, "get_act_offloading_ctx_manager"): "model, enable_activation_offloading",
    (FAIRSCALE, "OffloadModel"): (
        "model, device, offload_device=device(type='cpu'), num_slices=3, "
        "checkpoint_activation=False, num_microbatches=1"
    ),
    (MODALITIES, "ActivationCheckpointing.apply_activation_checkpointing_"): (
        "ac_variant, layers_fqn, model, ac_fun_params"
    ),
    (MODALITIES, "apply_activation_checkpointing_fsdp1_inplace"): (
        "model, activation_checkpointing_modules"
    ),
}
"""Parameters and their defaults, by library and name."""

IDS = [f"{module.partition('.')[0]} {name}" for module, name in TAKEN]


def read(text: str) -> dict[str, str]:
    """Defaults by parameter; empty where there is none."""
    parts = [each.partition("=") for each in text.split(", ") if each]
    return {name: default for name, _, default in parts}


def parameters(package: str, name: str) -> dict[str, str]:
    """Of a function, as :func:`read` gives them."""
    function = resolve_name(f"{package}:{name}")
    parameters = inspect.signature(function).parameters.values()
    return {p.name: "" if p.default is p.empty else repr(p.default) for p in parameters}


@pytest.mark.parametrize(("module", "name"), TAKEN, ids=IDS)
def test_what_is_written_here_is_what_they_take(module: str, name: str) -> None:
    pytest.importorskip(module, exc_type=ImportError)
    assert parameters(module, name) == read(TAKEN[module, name])


@pytest.mark.parametrize(("module", "name"), TAKEN, ids=IDS)
def test_what_they_take_is_taken_here_with_the_same_default(module: str, name: str) -> None:
    ours = parameters("pp_offload.checkpointing" if module == MODALITIES else "pp_offload", name)
    if "options" in ours:  # which are handed on
        ours |= parameters("pp_offload", "get_lora_act_offloading_ctx_manager")
    taken = read(TAKEN[module, name])
    assert taken.keys() <= ours.keys()
    assert all(default in ("", ours[option]) for option, default in taken.items())


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
