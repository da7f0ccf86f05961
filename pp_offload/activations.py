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
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from pp_offload._activations.context import Forward, NoOpManager, OffloadActivations
from pp_offload._activations.output_head import (
    get_act_offloading_ctx_manager,
    get_lora_act_offloading_ctx_manager,
)
from pp_offload._activations.stash import ActivationStash
from pp_offload._checkpoint.recompute import Recompute
from pp_offload._common.checks import check_kind
from pp_offload._common.processes import logger_of, warn_once
from pp_offload._common.torch_private import CheckpointWrapper
from pp_offload._core.saved import Packed, Resident
from pp_offload.backends import Backend
from pp_offload.config import OffloadConfig

logger = logger_of(__name__)


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
