"""Offload of all activations of a model on a device, or of hidden states, without marked groups.

    with OffloadActivations():  # or OffloadHiddenStates(model): what checkpointed layers are given
        loss = model(x).mean()
    loss.backward()

Tensors that autograd saves inside join a stash on the device; a full stash is offloaded as a
group, and reloaded, in reverse order, ahead of its backward. The last stash of a forward stays,
because its backward comes next; if another forward begins instead, it is offloaded, too. Each
entry is a microbatch of its own, so any number may be in flight.

A decoder's output head should be left out: it saves much, and backward needs that at once. See
:func:`get_lora_act_offloading_ctx_manager`.

NOTE [ One hook, in one place ]
    A compiler traces the hooks of all modules with each forward, and its code is for the places
    that they have in PyTorch's dict. PyTorch gives each registration a new place, so code compiled
    in one forward would fit no other. So there is one hook for all contexts, always in one place;
    and it does nothing while it is traced.

NOTE [ Hidden states ]
    The checkpoint function of a layer is wrapped by one that notes the first tensor it receives,
    whichever library checkpoints. The checkpoint saves that very tensor, and the pack hook
    recognizes it. Wrappers stay in place: without a context they only note the tensor. Masks and
    positions, which layers share, stay.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

from pp_offload._activations import ActivationStash
from pp_offload._checkpoint.recompute import Recompute
from pp_offload._common.checks import (
    brief,
    check_all,
    check_flag,
    check_kind,
    count_problem,
    flag_problem,
)
from pp_offload._common.processes import logger_of, warn_once
from pp_offload._common.torch_private import CheckpointWrapper, forward_pre_hooks, never_compiled
from pp_offload._core.eligibility import is_sharded
from pp_offload._core.saved import Packed, Resident
from pp_offload._core.statistics import OffloadStatistics, moved_text
from pp_offload._hooks import (
    HookScope,
    HookScopes,
    PackHook,
    exact_exit,
    is_in_region,
    is_left_to_checkpoint,
    top_pack,
    unpack,
    warn_of_region,
)
from pp_offload.backends import Backend
from pp_offload.config import OffloadConfig, config_or_default

logger = logger_of(__name__)

_PLACE = -1
"""Place of the hook; PyTorch counts from zero."""

_seeing: dict[_Forward, Callable[[Module], None]] = {}
_lock = threading.Lock()


class OffloadActivations(saved_tensors_hooks, ContextDecorator):
    """Context that offloads the tensors that autograd saves inside. Make one for a model, and enter
    it for each forward. In a checkpoint it does nothing: the checkpoint decides.

    Args:
        use_pin_memory: Offload to pinned memory, which copies need to run beside compute.
        use_streams: Copies run beside compute. Otherwise compute waits for every copy, and nothing
            is prefetched, whatever ``config`` says.
        min_offload_size: Smaller tensors stay on the device. In bytes.
        max_fwd_stash_size: Number of saved tensors, not bytes, that gather on the device. They
            leave together when an operator behind them saves a tensor.
        config: Tiers, and limits on them; ``device_limit_bytes`` limits the device.
        backend: Device to work on; the accelerator if present, else the CPU.

    Raises:
        ValueError: A size is too small or no integer, or a flag neither True nor False.
        TypeError: ``config`` is no :class:`OffloadConfig`, or ``backend`` no backend.

    Source: torchtune and TRL ``OffloadActivations``.
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        *,
        min_offload_size: int = 1024,
        max_fwd_stash_size: int = 5,
        config: OffloadConfig | None = None,
        backend: Backend | None = None,
    ) -> None:
        check_all(
            flag_problem("use_pin_memory", use_pin_memory),
            flag_problem("use_streams", use_streams),
            count_problem("min_offload_size", min_offload_size, 0, "bytes"),
            count_problem("max_fwd_stash_size", max_fwd_stash_size, 1, "tensors"),
        )
        config = config_or_default(config)
        if not use_streams:
            config = replace(config, max_in_flight_bytes=0, prefetch_bytes=0)
        self.stash = ActivationStash(
            "activations",
            config,
            min_offload_size=min_offload_size,
            max_tensors=max_fwd_stash_size,
            use_pin_memory=use_pin_memory,
            has_limit=True,
            backend=backend,
        )
        self.use_pin_memory, self.use_streams = use_pin_memory, use_streams
        self.min_offload_size = self.min_tensor_size_bytes = min_offload_size  # TRL's name for it
        self.max_fwd_stash_size = max_fwd_stash_size
        self._models: weakref.WeakSet[Module] = weakref.WeakSet()  # that it was told of
        self._scopes = HookScopes()
        super().__init__(partial(_pack, self.stash), unpack)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {moved_text(self.statistics())}>"

    @never_compiled
    def __enter__(self) -> OffloadActivations:  # type: ignore[override]
        """Begin the forward of a microbatch; inside a checkpoint, do nothing."""
        self._scopes.enter(_Forward(), self._begin)
        return self

    def _begin(self, forward: _Forward) -> None:
        if is_left_to_checkpoint():
            if is_in_region():
                warn_of_region(type(self).__name__)
            return
        if top_pack() is None:  # else it may begin inside an excluded module
            _here.excluded = None  # the mark of an interrupted forward
        self.stash.begin()
        has_fsdp = "torch.distributed.fsdp" in sys.modules
        parts = (part for model in self._models for part in model.modules())
        if not self._models or (has_fsdp and any(map(is_sharded, parts))):
            forward.call_with_modules(self._keep_memory_of)
        forward.enter(PackHook(self.pack_hook), self)

    @exact_exit
    @never_compiled
    def __exit__(self, *args: Any) -> None:
        """End the forward of a microbatch.

        Raises:
            GroupStateError: This thread has not entered it.
        """
        self._scopes.leave(*args[1:2])
        self.stash.end()

    def keep_module(self, model: Module) -> None:
        """Keep parameters and buffers on the device, also if a view of them is saved.

        Without this, a hook on every module's forward finds the buffers, which takes some time. The
        hook is also needed for a model of FSDP, which gathers parameters anew in each forward.
        """
        check_kind("model", model, Module, "an nn.Module")
        self._models.add(model)
        self.stash.residents.add_module(model)

    update_model_params = keep_module

    def statistics(self) -> OffloadStatistics:
        return self.stash.statistics()

    def _keep_memory_of(self, module: Module) -> None:
        """Keep what FSDP gathers, and buffers: they change without a trace, even during a copy."""
        if is_sharded(module):
            self.stash.keep_gathered(module)
        is_compiled = "_orig_mod" in module._modules  # hides the modules inside
        for buffer in module.buffers() if is_compiled else module._buffers.values():
            if buffer is not None:
                self.stash.residents.add(buffer)


class _Forward(HookScope):
    """Hooks that a ``with`` has put in place: for saved tensors, and for running modules."""

    def call_with_modules(self, see: Callable[[Module], None]) -> None:
        """Call ``see`` with each module whose forward begins, except in compiled code."""
        with _lock:
            _seeing[self] = see
            forward_pre_hooks[_PLACE] = _meet

    def leave(self, failure: BaseException | None = None) -> None:
        with _lock:
            _seeing.pop(self, None)
            if not _seeing:
                forward_pre_hooks.pop(_PLACE, None)
        super().leave(failure)  # last: after an interrupt, nothing else shows that it ended


def _meet(module: Module, _: object) -> None:
    if not torch.compiler.is_compiling():
        for see in list(_seeing.values()):  # a copy: other threads begin and end
            see(module)


class _OfThread(threading.local):
    excluded: int | None = None  # id of the outermost excluded module whose forward runs
    noted: Tensor | None = None  # given to a checkpoint, until the checkpoint saves it


_here = _OfThread()


def exclude(module: Module) -> None:
    """Keep tensors that ``module`` saves in its forward on the device, from now on.

    Its forward sets a mark, which the pack hook of a context reads. Saved-tensor hooks of its own
    would take tensors away from a checkpoint around the module. Checkpoints and groups ignore the
    mark. In a compiled region it has no effect.
    """
    check_kind("module", module, Module, "an nn.Module")
    if _enter not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_enter)
        module.register_forward_hook(_leave, always_call=True)


def is_excluded() -> bool:
    """Whether the forward of an excluded module runs on this thread."""
    return _here.excluded is not None


def _enter(module: Module, _: object) -> None:
    if not torch.compiler.is_compiling() and _here.excluded is None:
        _here.excluded = id(module)


def _leave(module: Module, *_: object) -> None:
    """Remove the mark of this module, which has none if a hook raised before :func:`_enter` ran."""
    if not torch.compiler.is_compiling() and _here.excluded == id(module):
        _here.excluded = None


@never_compiled
def _pack(stash: ActivationStash, tensor: Tensor) -> Packed:
    return Resident(tensor) if is_excluded() else stash.pack(tensor)


class NoOpManager(saved_tensors_hooks, ContextDecorator):
    """Context whose saved tensors stay on the device, even inside :class:`OffloadActivations`.

    A checkpoint around the context also keeps the tensors saved inside.
    """

    def __init__(self) -> None:
        super().__init__(Resident, unpack)


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
    inside = [getattr(model, name, None) for name in WRAPPERS]
    # Models that take adapters themselves have the configuration, but no base model.
    base = getattr(model, "get_base_model", None)
    if callable(base) and hasattr(model, "peft_config"):
        inside.append(base())
    inner = next((m for m in inside if isinstance(m, Module) and m is not model), None)
    return model if inner is None else unwrapped(inner)


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
            :class:`OffloadActivations`.

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

    def _begin(self, forward: _Forward) -> None:
        model = self._model()
        if model is not None:  # each time: a trainer enables checkpoints when it begins
            layers = list(_checkpointed(model))
            for layer, name, function in layers:
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


def _pack_noted(stash: ActivationStash, tensor: Tensor) -> Packed:
    if tensor is not _here.noted:
        return Resident(tensor)
    _here.noted = None
    packed = stash.pack(tensor)
    stash.send_if_full()  # a checkpoint saves and writes nothing, unlike an operator
    return packed


def _checkpointed(model: Module) -> Iterator[tuple[Module, str, Callable[..., Any]]]:
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
            yield module, name, function


__all__ = [
    "NoOpManager",
    "OffloadActivations",
    "OffloadHiddenStates",
    "get_act_offloading_ctx_manager",
    "get_lora_act_offloading_ctx_manager",
]
