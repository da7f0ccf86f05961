"""Offload of all activations of a model on a device, or of hidden states, without marked groups.

    with OffloadHiddenStates(model):  # only what checkpointed layers are given
        loss = model(x).mean()
    loss.backward()

NOTE [ Hidden states ]
    The checkpoint function of a layer is wrapped by one that notes the first tensor it receives,
    whichever library checkpoints. The checkpoint saves that very tensor, and the pack hook
    recognizes it. Wrappers stay in place: without a context they only note the tensor. Masks and
    positions, which layers share, stay.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from pp_offload._activations.context import Forward, NoOpManager, OffloadActivations, exclude
from pp_offload._activations.stash import ActivationStash
from pp_offload._checkpoint.recompute import Recompute
from pp_offload._common.checks import brief, check_flag, check_kind
from pp_offload._common.processes import logger_of, warn_once
from pp_offload._common.torch_private import CheckpointWrapper
from pp_offload._core.saved import Packed, Resident
from pp_offload.backends import Backend
from pp_offload.config import OffloadConfig

logger = logger_of(__name__)

# All but what the output head saves, which backward needs at once

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


# What checkpointed layers are given


class OffloadHiddenStates(OffloadActivations):
    """Offload the hidden states given to checkpointed layers, and nothing else.

    Layers are those of Hugging Face with gradient checkpointing, reentrant or not, and those in
    PyTorch's ``CheckpointWrapper``. Checkpoints of this package have ``offload_inputs`` instead.
    Nothing leaves in a compiled region, or of a layer whose hidden states are a keyword argument: a
    checkpoint keeps those itself.

    Args:
        model: Its checkpoints may be enabled later. Its parameters and buffers stay on the device.
        max_fwd_stash_size: Number of them on the device at which they are offloaded together. If 1,
            each is offloaded when its layer begins; those of an unfinished stash stay.
        use_pin_memory, use_streams, min_offload_size, config, backend: See
            :class:`pp_offload._activations.context.OffloadActivations`.

    Source: axolotl ``activation_offloading: hidden_states``.
    """

    def __init__(
        self,
        model: Module,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        *,
        min_offload_size: int = 1024,
        max_fwd_stash_size: int = 1,
        config: OffloadConfig | None = None,
        backend: Backend | None = None,
    ) -> None:
        check_kind("model", model, Module, "an nn.Module")
        super().__init__(
            use_pin_memory,
            use_streams,
            min_offload_size=min_offload_size,
            max_fwd_stash_size=max_fwd_stash_size,
            config=config,
            backend=backend,
        )
        self.keep_module(model)
        self.pack_hook = partial(_pack_noted, self.stash)
        self._model = weakref.ref(model)

    def _begin(self, forward: Forward) -> None:
        model = self._model()
        if model is not None:  # each time: a trainer enables checkpoints when it begins
            layers = list(_checkpointed(model))
            for layer, name in layers:
                function = getattr(layer, name)
                if not isinstance(function, _Noting):
                    setattr(layer, name, _Noting(function))
            if not layers and torch.is_grad_enabled():
                warn_once(
                    logger,
                    self,
                    "no layer of %s is checkpointed, so nothing leaves the device; call "
                    "model.activation_checkpointing_enable() before the forward "
                    "(gradient_checkpointing_enable before transformers 5.23), or take "
                    "OffloadActivations, with which all activations leave",
                    type(model).__name__,
                )
        super()._begin(forward)


class _Noting(partial):  # type: ignore[type-arg]
    """A checkpoint function that notes the tensor it is about to keep."""

    def __call__(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().__call__(run, *args, **kwargs)
        first = next((arg for arg in args if isinstance(arg, Tensor)), None)
        outer, _here.noted = _here.noted, first
        try:
            return super().__call__(run, *args, **kwargs)
        finally:
            _here.noted = outer


class _OfThread(threading.local):
    """Tensor given to the checkpoint on a thread, until the checkpoint saves it."""

    noted: Tensor | None = None


_here = _OfThread()


def _pack_noted(stash: ActivationStash, tensor: Tensor) -> Packed:
    if tensor is not _here.noted:
        return Resident(tensor)
    _here.noted = None
    packed = stash.pack(tensor)
    stash.send_if_full()  # a checkpoint saves and writes nothing, unlike an operator
    return packed


def _checkpointed(model: Module) -> Iterator[tuple[Module, str]]:
    """Yield modules that call a checkpoint function, with the attribute that holds it."""
    for module in model.modules():
        if isinstance(module, CheckpointWrapper):
            name = "checkpoint_fn"
        elif getattr(module, "gradient_checkpointing", False):
            name = "_gradient_checkpointing_func"
        else:
            continue
        function = getattr(module, name, None)
        if callable(function) and not isinstance(getattr(function, "func", None), Recompute):
            yield module, name


__all__ = [
    "NoOpManager",
    "OffloadActivations",
    "OffloadHiddenStates",
    "get_act_offloading_ctx_manager",
    "get_lora_act_offloading_ctx_manager",
]
