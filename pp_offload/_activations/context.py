"""Offload of all activations of a model on a device, without marked groups.

    with OffloadActivations():
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
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import ContextDecorator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

from pp_offload._activations.stash import ActivationStash
from pp_offload._common.checks import check_all, check_kind, count_problem, flag_problem
from pp_offload._common.torch_private import forward_pre_hooks, never_compiled
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

_PLACE = -1
"""Place of the hook; PyTorch counts from zero."""

_seeing: dict[Forward, Callable[[Module], None]] = {}
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
        self._models: WeakSet[Module] = WeakSet()  # that it was told of
        self._scopes = HookScopes()
        super().__init__(partial(_pack, self.stash), unpack)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {moved_text(self.statistics())}>"

    @never_compiled
    def __enter__(self) -> OffloadActivations:  # type: ignore[override]
        """Begin the forward of a microbatch; inside a checkpoint, do nothing."""
        self._scopes.enter(Forward(), self._begin)
        return self

    def _begin(self, forward: Forward) -> None:
        if is_left_to_checkpoint():
            if is_in_region():
                warn_of_region(type(self).__name__)
            return
        if top_pack() is None:  # else it may begin inside an excluded module
            _running.module = None  # the mark of an interrupted forward
        self.stash.begin()
        parts: Iterable[Module] = ()
        if "torch.distributed.fsdp" in sys.modules:
            parts = chain.from_iterable(model.modules() for model in self._models)
        if not self._models or any(map(is_sharded, parts)):
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
        """Keep on the device the parameters that FSDP gathers, and buffers: both change without a
        trace, even during a copy. A compiled module hides the modules inside, so all of its buffers
        are kept at once.
        """
        if is_sharded(module):
            self.stash.keep_gathered(module)
        is_compiled = "_orig_mod" in module._modules
        for buffer in module.buffers() if is_compiled else module._buffers.values():
            if buffer is not None:
                self.stash.residents.add(buffer)


class Forward(HookScope):
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


class _Running(threading.local):
    """Forward of an excluded module that runs on this thread."""

    module: int | None = None
    """Id of the outermost such module."""


_running = _Running()


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
    return _running.module is not None


def _enter(module: Module, _: object) -> None:
    if not torch.compiler.is_compiling() and _running.module is None:
        _running.module = id(module)


def _leave(module: Module, *_: object) -> None:
    """Remove the mark of this module, which has none if a hook raised before :func:`_enter` ran."""
    if not torch.compiler.is_compiling() and _running.module == id(module):
        _running.module = None


@never_compiled
def _pack(stash: ActivationStash, tensor: Tensor) -> Packed:
    return Resident(tensor) if is_excluded() else stash.pack(tensor)


class NoOpManager(saved_tensors_hooks, ContextDecorator):
    """Context whose saved tensors stay on the device, even inside :class:`OffloadActivations`.

    A checkpoint around the context also keeps the tensors saved inside.
    """

    def __init__(self) -> None:
        super().__init__(Resident, unpack)
