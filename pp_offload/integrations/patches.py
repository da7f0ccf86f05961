"""Offload for scripts that use PyTorch's or TRL's offload: beside compute, with the same numbers.

python -m pp_offload train.py --its --options
patch = pp_offload.patch()  # or in the script, before the model is wrapped or trained
"""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import Module, Parameter
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import SAC_IGNORED_OPS, SelectiveCheckpointContext

from pp_offload._activations import ActivationStash
from pp_offload._checkpoint import selective
from pp_offload._common.checks import check_count
from pp_offload._common.text import size_text
from pp_offload._common.torch_private import records_operators, tree_leaves
from pp_offload._common.undo import UndoStack
from pp_offload._core.saved import Resident
from pp_offload._core.statistics import OffloadStatistics, step_text
from pp_offload._hooks import HookScope, HookScopes, PackHook, exact_exit, is_left_to_checkpoint
from pp_offload.activations import OffloadActivations, get_lora_act_offloading_ctx_manager
from pp_offload.backends import Backend
from pp_offload.config import OffloadConfig
from pp_offload.errors import OffloadError

TRL = "trl.models.activation_offloading"
"""Module that implements TRL's ``activation_offloading=True``."""

MAX_TENSORS = 5
"""Number of saved tensors offloaded together; fewer when a ``save_on_cpu`` ends."""

_active: patch | None = None


class patch(AbstractContextManager["patch"]):  # noqa: N801  called as a function is
    """Route other libraries' offload of activations through this package, overlapped with compute.

    The patch is active from construction until :meth:`undo`, and is a context manager as well.

    It replaces ``save_on_cpu``, which transformers, FSDP plugins of accelerate and
    ``torch.distributed``'s ``offload_wrapper`` call; the context that TRL's
    ``activation_offloading=True`` makes; and ``create_selective_checkpoint_contexts``, because
    eager PyTorch recomputes what ``CheckpointPolicy.MUST_CPU_OFFLOAD`` asks to offload.

    PyTorch's are replaced for all importers, before or after. TRL is imported if it is installed.
    Compiled code keeps PyTorch's own.

    Args:
        config: Tiers, and limits on them, as of :class:`pp_offload.OffloadActivations`. By default
            tensors stay on the device while it has room.
        min_offload_size: Smaller tensors stay on the device. In bytes.
        backend: Device to work on; the accelerator where there is one, else the CPU.

    Raises:
        OffloadError: A patch is active already.
        TypeError: ``config`` is no :class:`OffloadConfig`, or ``backend`` no backend.
        ValueError: ``min_offload_size`` is no number of bytes.
    """

    def __init__(
        self,
        config: OffloadConfig | None = None,
        *,
        min_offload_size: int = 1024,
        backend: Backend | None = None,
    ) -> None:
        global _active
        check_count("min_offload_size", min_offload_size, unit="bytes")
        options = dict[str, Any](config=config, min_offload_size=min_offload_size, backend=backend)
        self._stash = ActivationStash(
            "save_on_cpu", max_tensors=MAX_TENSORS, has_limit=True, **options
        )
        self._make_context: Any = partial(get_lora_act_offloading_ctx_manager, **options)
        self._contexts: list[OffloadActivations] = []  # of TRL's trainers
        self._undo = UndoStack()
        if _active is not None:
            raise OffloadError(
                "pp_offload.patch() is active already; use the handle that it returned, or undo() "
                "that first"
            )
        try:
            self._replace_all()
            _active = self
        except BaseException:
            self.undo()
            raise

    def _replace_all(self) -> None:
        self._undo.set(save_on_cpu, "__enter__", _enter)
        self._undo.set(save_on_cpu, "__exit__", _exit)
        if hasattr(checkpoints.CheckpointPolicy, "MUST_CPU_OFFLOAD"):  # since torch 2.13
            self._undo.callback(setattr, _select, "__code__", _select.__code__)
            _select.__code__ = _in_place_of_torchs.__code__
        if importlib.util.find_spec("trl") is not None:
            name = "get_act_offloading_ctx_manager"
            original = getattr(importlib.import_module(TRL), name)
            for module in [*sys.modules.values()]:  # also where it was imported by name
                if getattr(module, "__dict__", {}).get(name) is original:
                    self._undo.set(module, name, self._context_of)

    def _context_of(self, model: Module, **options: Any) -> OffloadActivations:
        """Make a context, with the parameters of TRL's ``get_act_offloading_ctx_manager``."""
        context: OffloadActivations = self._make_context(model, **options)
        self._contexts.append(context)
        return context

    def statistics(self) -> OffloadStatistics:
        """Bytes that ``save_on_cpu`` moved and holds. TRL's contexts have their own statistics."""
        return self._stash.statistics()

    def undo(self) -> None:
        """Restore all functions. Offloaded tensors stay valid. A second call does nothing."""
        global _active
        self._undo.close()
        if _active is self:
            _active = None

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        counts = [self.statistics(), *(context.statistics() for context in self._contexts)]
        moved = sum(each.bytes_offloaded for each in counts)
        again = sum(each.bytes_computed_again for each in counts)
        host = sum(each.host_bytes_peak for each in counts)
        state = "active" if _active is self else "undone"
        if not moved and not again:
            why = "no option asked for it, or too few tensors have min_offload_size bytes"
            return f"<pp_offload.patch: {state}; nothing offloaded: {why}>"
        text = f"{size_text(moved)} offloaded, {size_text(again)} computed again instead; at most "
        text += f"{size_text(host)} in host memory at a time{step_text(*counts)}"
        return f"<pp_offload.patch: {state}, {text}>"


class _Saving(HookScope):
    """Hooks of a ``save_on_cpu``, whose tensors leave when it ends."""

    def __init__(self, stash: ActivationStash) -> None:
        super().__init__()
        self._stash = stash

    def begin(self, owner: save_on_cpu) -> None:
        """Save tensors through the stash; do nothing inside a checkpoint, which recomputes them."""
        if not is_left_to_checkpoint():
            if self._stash.is_over:
                self._stash.begin()
            self.enter(PackHook(self._stash.pack), owner)

    def leave(self, failure: BaseException | None = None) -> None:
        super().leave(failure)
        self._stash.send()


_entered = HookScopes()
"""Scopes of all ``save_on_cpu``, which may be entered several times, and on several threads."""


def _enter(self: save_on_cpu) -> None:
    active = _active
    if torch.compiler.is_compiling() or active is None or type(self) is not save_on_cpu:
        saved_tensors_hooks.__enter__(self)  # a subclass has hooks of its own
    else:
        _entered.enter(_Saving(active._stash), partial(_Saving.begin, owner=self))


@exact_exit
def _exit(self: save_on_cpu, *error: Any) -> None:
    if torch.compiler.is_compiling() or not _entered.scopes or type(self) is not save_on_cpu:
        saved_tensors_hooks.__exit__(self, *error)
    else:
        _entered.leave(*error[1:2])


SAVES = (True, "MUST_SAVE", "PREFER_SAVE")
OFFLOADS = ("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")
_select = checkpoints.create_selective_checkpoint_contexts
_contexts_of_torch = FunctionType(_select.__code__, _select.__globals__, None, _select.__defaults__)


def _in_place_of_torchs(policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False) -> Any:
    """Code of PyTorch's function while patched. Not another function: a partial may hold theirs."""
    from pp_offload.integrations import patches  # it runs with the names of their module

    return patches.contexts_of(policy_fn_or_list, allow_cache_entry_mutation)


def contexts_of(policy: Any, *options: Any) -> tuple[Any, Any]:
    """Make the contexts of a selective checkpoint; PyTorch's own for a list, and while compiling.

    Whatever ``allow_cache_entry_mutation`` is, an output that another operator of the checkpoint
    writes into is recomputed; to change one after the checkpoint is an error if backward needs it.
    """
    if _active is None or not callable(policy) or records_operators():
        return _contexts_of_torch(policy, *options)
    chosen = _ChosenOutputs(policy, _active._stash)
    return chosen, _ChosenAgain(chosen)


class _ChosenOutputs(selective.KeptOutputs):
    """Outputs that a user's policy saves or offloads. Compiled code inside runs compiled."""

    _stash: ActivationStash
    ignore_compile_internals = classmethod(lambda cls: True)

    def __init__(self, policy: Callable[..., Any], stash: ActivationStash) -> None:
        super().__init__({}, (), stash, selective.CheckpointCounts(), preserve_rng_state=True)
        self._policy = policy
        self._calls = defaultdict(list)

    def _calls_of(self, op: Any, args: Any) -> Any:
        is_ignored = op in SAC_IGNORED_OPS or (op is selective.CAST and self._has_cached)
        return None if is_ignored else self._calls[_key(op, args)]

    def _pack_of(self, op: Any, args: Any, kwargs: Any, outputs: Any) -> Any:
        context = SelectiveCheckpointContext(is_recompute=False, op_output=outputs)
        choice = self._policy(context, op, *args, **kwargs)
        name = getattr(choice, "name", choice)
        if name not in OFFLOADS:
            return Resident if name in SAVES else None
        if self._stash.is_over:
            self._stash.begin()
        self._stash.send_if_full()
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Parameter):  # else a view of it, such as ``t()``, would leave
                self._stash.residents.add(tensor)
        return self._stash.pack

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stash.send()  # outside the mode, which would see the engine's own operators


class _ChosenAgain(selective.Recomputation):
    """Frees outputs once a backward has used them. Another backward recomputes them."""

    ignore_compile_internals = classmethod(lambda cls: True)

    def _next_call(self, op: Any, args: Any) -> Any:
        key = _key(op, args)
        call = super()._next_call(key, args)
        if call is not None:
            self._calls[key][self._num_asked[key] - 1] = None
        return call


def _key(op: Any, args: Any) -> Any:
    """Return what calls are counted by: the operator, or compiled code, which may run only once."""
    is_compiled = getattr(op, "__name__", "") == "inductor_compiled_code"
    return (op, getattr(args[0], "idx", args[0])) if is_compiled else op
