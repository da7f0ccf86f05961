"""Offload of a model's activations except its output head's, which backward needs at once."""

from __future__ import annotations

import warnings
from typing import Any

from torch.nn import Module

from pp_offload._activations.context import NoOpManager, OffloadActivations, exclude
from pp_offload._common.checks import brief, check_flag, check_kind
from pp_offload.backends import Backend
from pp_offload.config import OffloadConfig

HEADS = (
    "output.linear output lm_head decoder.output decoder.lm_head final_layer_norm ln_f norm head "
    "score classifier qa_outputs v_head"
).split()
"""Names of output heads, or of the last modules of models; the first that exists is taken. The last
four are of classifiers and value models. If a model has a norm and a ``head``, name the head.
"""

WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "pretrained_model")
"""Attributes that hold the wrapped model: parallel, compiled, checkpoint, value model."""


def get_act_offloading_ctx_manager(
    model: Module, enable_activation_offloading: bool = True, **options: Any
) -> OffloadActivations | NoOpManager:
    """Make a context for the forward of ``model``.

    Args:
        model: See :func:`get_lora_act_offloading_ctx_manager`.
        enable_activation_offloading: False for a context in which nothing is offloaded, not even
            by other saved-tensor hooks.
        options: Options of :func:`get_lora_act_offloading_ctx_manager`, by name.

    Source: torchtune ``get_act_offloading_ctx_manager``; with the options of TRL's.
    """
    check_flag("enable_activation_offloading", enable_activation_offloading)
    if not enable_activation_offloading:
        return NoOpManager()
    return get_lora_act_offloading_ctx_manager(model, **options)


def get_lora_act_offloading_ctx_manager(
    model: Module,
    use_pin_memory: bool = True,
    use_streams: bool = True,
    *,
    min_offload_size: int = 1024,
    max_fwd_stash_size: int = 5,
    warn_if_no_head: bool = True,
    head: Module | str | None = None,
    config: OffloadConfig | None = None,
    backend: Backend | None = None,
) -> OffloadActivations:
    """Make a context for the forward of ``model``, which may be wrapped, for example by PEFT.

    Args:
        model: Its parameters and buffers, and tensors that its head saves, stay on the device.
        use_pin_memory, use_streams, min_offload_size, max_fwd_stash_size, config, backend: See
            :class:`OffloadActivations`.
        warn_if_no_head: Warn if no output head is found.
        head: The output head, or its name in the model; None searches :data:`HEADS`, then asks the
            model's ``get_output_embeddings``.

    Raises:
        ValueError: ``head`` names no module of the model, or a number or flag cannot be right.
        TypeError: ``model`` is no module.

    Source: axolotl ``get_lora_act_offloading_ctx_manager``.
    """
    check_kind("model", model, Module, "an nn.Module")
    check_flag("warn_if_no_head", warn_if_no_head)
    output_head = find_head(model) if head is None else _chosen(model, head)
    offload = OffloadActivations(
        use_pin_memory,
        use_streams,
        min_offload_size=min_offload_size,
        max_fwd_stash_size=max_fwd_stash_size,
        config=config,
        backend=backend,
    )
    offload.keep_module(model)
    if output_head is not None:
        exclude(output_head)
    elif warn_if_no_head:
        warnings.warn(
            f"no output head found in {type(model).__name__}: what it saves is offloaded, and "
            "needed at once; name it with head=, or pass warn_if_no_head=False",
            stacklevel=2,
        )
    for name, module in model.named_modules():
        if "liger" in name.lower():  # such as a fused loss: backward needs what it saves
            exclude(module)
    return offload


def unwrapped(model: Module) -> Module:
    """Return the model inside wrappers, including PEFT's."""
    while (inner := _inside(model)) is not None:
        model = inner
    return model


def _inside(model: Module) -> Module | None:
    inside = [getattr(model, name, None) for name in WRAPPERS]
    # Models that take adapters themselves have the configuration, but no base model.
    base = getattr(model, "get_base_model", None)
    if callable(base) and hasattr(model, "peft_config"):
        inside.append(base())
    return next((m for m in inside if isinstance(m, Module) and m is not model), None)


def find_head(model: Module) -> Module | None:
    """Find the output head by its usual names, or by the model's own method."""
    inner = unwrapped(model)
    for name in HEADS:
        value: object = inner
        for part in name.split("."):
            value = getattr(value, part, None)
        if isinstance(value, Module):
            return value
    ask = getattr(inner, "get_output_embeddings", None)
    head = ask() if callable(ask) else None
    return head if isinstance(head, Module) else None


def _chosen(model: Module, head: Module | str) -> Module:
    if head is model or head is unwrapped(model):
        raise ValueError(
            "head is the model itself, so nothing would be offloaded; expected a module inside it"
        )
    if isinstance(head, Module):
        return head
    named = dict(unwrapped(model).named_modules()) | dict(model.named_modules())
    if not head or head not in named:
        raise ValueError(
            f"head is {brief(head)}, but the model has no module of that name; expected one of "
            "model.named_modules()"
        )
    return named[head]
