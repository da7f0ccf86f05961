"""Offload for scripts that use PyTorch's or TRL's offload: beside compute, with the same numbers.

python -m pp_offload train.py --its --options
patch = pp_offload.patch()  # or in the script, before the model is wrapped or trained
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import Module, Parameter
from torch.utils.checkpoint import CheckpointPolicy, get_device_states

from pp_offload._activations.context import OffloadActivations
from pp_offload._activations.stash import ActivationStash
from pp_offload._checkpoint.selective import same_version_counter, storages_of, written_arguments
from pp_offload._common.checks import check_count
from pp_offload._common.text import size_text
from pp_offload._common.torch_private import CachingTorchDispatchMode, tree_leaves, tree_map
from pp_offload._common.undo import UndoStack
from pp_offload._core.saved import Packed, Resident
from pp_offload._core.statistics import OffloadStatistics, step_text
from pp_offload._hooks import HookScope, HookScopes, PackHook, exact_exit, is_left_to_checkpoint
from pp_offload.activations import get_lora_act_offloading_ctx_manager
from pp_offload.backends import Backend
from pp_offload.config import OffloadConfig
from pp_offload.errors import OffloadError, SavedTensorModifiedError

TRL = "trl.models.activation_offloading"
"""Module that implements TRL's ``activation_offloading=True``."""

MAX_TENSORS = 5
"""Number of saved tensors offloaded together; fewer when a ``save_on_cpu`` ends."""

_active: patch | None = None


class patch:  # noqa: N801  called as a function is
    """Route other libraries' offload of activations through this package, overlapped with compute.

    The patch is active from construction until :meth:`undo`, and is a context manager as well.

    It replaces ``save_on_cpu``, which transformers, FSDP plugins of accelerate and
    ``torch.distributed``'s ``offload_wrapper`` call; the context that TRL's
    ``activation_offloading=True`` makes; and the handling of
    ``CheckpointPolicy.MUST_CPU_OFFLOAD`` in checkpoints, which eager PyTorch recomputes.

    ``save_on_cpu`` is replaced in ``torch.autograd.graph`` for all importers, before or after.
    TRL is imported if it is installed. Compiled code keeps PyTorch's own.

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
        if hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"):  # since torch 2.13
            self._undo.set(_Mode, "__init__", _init)
            self._undo.set(_Mode, "__torch_dispatch__", _dispatch)
            self._undo.set(_Mode, "__exit__", _exit_mode)
        if importlib.util.find_spec("trl") is not None:
            self._replace_everywhere(importlib.import_module(TRL))

    def _replace_everywhere(self, trl: Any) -> None:
        """Replace TRL's function also where it was imported by name."""
        name = "get_act_offloading_ctx_manager"
        original = getattr(trl, name)
        for module in [*sys.modules.values()]:
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

    def __enter__(self) -> patch:
        return self

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


OFFLOADS = ("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")
Calls = dict[int, Any]
"""Outputs of an operator's calls in a selective checkpoint, by number; for a call that the
recomputation runs again, a mark, which is a bare object.
"""


class _NotedPolicy:
    """User's policy for selective checkpoints; notes its last answer.

    PyTorch recomputes outputs that a policy offloads. :func:`_dispatch` replaces the mark of such a
    call by its offloaded outputs. Outputs that an operator writes into get their mark back, as do
    those of operators that drew random numbers, because later operators would draw others.

    Methods of PyTorch's mode are replaced and not the mode, because operators have rules for its
    class.
    """

    def __init__(self, policy: Callable[..., Any]) -> None:
        self._policy = policy
        self.leaves = False
        self._marks: WeakKeyDictionary[UntypedStorage, list[tuple[Calls, int, object]]]
        self._marks = WeakKeyDictionary()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        choice = self._policy(*args, **kwargs)
        self.leaves = getattr(choice, "name", "") in OFFLOADS
        return choice

    def offload(self, stash: ActivationStash, output: Any, calls: Calls, number: int) -> None:
        """Replace the mark of a call by its outputs."""
        mark, calls[number] = calls[number], tree_map(partial(_Offloaded, stash), output)
        for storage in storages_of(output):
            self._marks.setdefault(storage, []).append((calls, number, mark))

    def recompute_written(self, written: Any) -> None:
        """Restore the marks of all outputs that share memory with these arguments."""
        for storage in storages_of(written):
            for calls, number, mark in self._marks.pop(storage, ()):
                calls[number] = mark


_Mode = CachingTorchDispatchMode
_init_mode, _dispatch_in_mode = _Mode.__init__, _Mode.__torch_dispatch__


def _init(self: _Mode, policy_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    _init_mode(self, _NotedPolicy(policy_fn), *args, **kwargs)


def _dispatch(self: _Mode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Run an operator in the forward of a selective checkpoint, and offload its output if asked."""
    policy, active = self.policy_fn, _active
    if active is None or not isinstance(policy, _NotedPolicy):
        return _dispatch_in_mode(self, func, types, args, kwargs)
    may_draw = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    before = _random_state(args) if may_draw else []
    policy.leaves = False
    output = _dispatch_in_mode(self, func, types, args, kwargs)
    written = written_arguments(func, args, kwargs or {})
    policy.recompute_written(written)
    calls, number = self.storage.get(func, {}), self.func_counter.get(func, 0) - 1
    # Compiled code has outputs in place of marks, or other keys.
    is_recomputed = not written and policy.leaves and type(calls.get(number)) is object
    if is_recomputed and all(map(torch.equal, before, _random_state(args) if may_draw else [])):
        stash = active._stash
        if stash.is_over:
            stash.begin()
        stash.send_if_full()
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Parameter):  # else a view of it, such as ``t()``, would leave
                stash.residents.add(tensor)
        policy.offload(stash, output, calls, number)
    return output


def _exit_mode(self: _Mode, *error: Any) -> Any:
    result = super(_Mode, self).__exit__(*error)
    if _active is not None:  # outside the mode, which would see the engine's own operators
        _active._stash.send()
    return result


def _random_state(args: Any) -> list[Tensor]:
    """Return the states of the generators that an operator with these arguments may use."""
    return [torch.get_rng_state(), *get_device_states(*tree_leaves(args))[1]]


class _Offloaded:
    """An offloaded output, in place of PyTorch's ``_VersionWrapper``."""

    def __init__(self, stash: ActivationStash, value: Any) -> None:
        self._value = value
        if isinstance(value, Tensor):
            with same_version_counter():
                self._value = stash.pack(value.detach())
            self._version = value._version

    def get_val(self, allow_cache_entry_mutation: bool) -> Any:
        """Return the output as it was.

        Raises:
            SavedTensorModifiedError: The output was changed in place since.
        """
        if not isinstance(self._value, Packed):
            return self._value
        tensor = self._value.unpack()
        is_changed = isinstance(self._value, Resident) and tensor._version != self._version
        if is_changed and not allow_cache_entry_mutation:
            raise SavedTensorModifiedError(
                f"an output of shape {tuple(tensor.shape)}, which a selective checkpoint was to "
                "offload, was changed in place after the checkpoint; use PREFER_RECOMPUTE"
            )
        with same_version_counter():  # an alias: autograd will tie it to the graph
            return tensor.detach()
