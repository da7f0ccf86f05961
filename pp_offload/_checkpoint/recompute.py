"""Activation checkpoints: PyTorch's, with inputs that may be offloaded.

A tensor anywhere in the arguments is handed to :func:`torch.utils.checkpoint.checkpoint` as one
that it saves, so it passes the hooks of autograd, and with a stash it leaves the device. A function
that runs again sees its modules' buffers as they were, and changes none.

    recompute = Recompute(FullACParams(offload_inputs=True))
    y = recompute(layer, x, mask=mask)

A function that is called per layer has no place to keep streams and host memory, and inputs of
separately wrapped layers should be reloaded ahead of each other's backward. So the engine
for a set of options stays for the process, and :func:`shared_for` finds it by these options.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import is_dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.checkpoint import checkpoint

from pp_offload._activations import ActivationStash
from pp_offload._checkpoint.module_state import ModuleState
from pp_offload._checkpoint.options import FullACParams
from pp_offload._checkpoint.selective import CheckpointCounts, KeptOutputs, Recomputation
from pp_offload._common.torch_private import (
    is_transformed,
    never_compiled,
    records_operators,
    tree_flatten,
    tree_unflatten,
)
from pp_offload._hooks import PackHook, expected, is_left_to_checkpoint, is_recomputing, saving
from pp_offload.backends import Backend, check_backend

_lock = threading.Lock()
_of_default: list[Recompute] = []
"""Engines of the default backend. Not a dict: options may hold mappings, which are no keys."""


class Recompute:
    """Runs functions under a checkpoint; ``stash`` is None if all stays on the device."""

    def __init__(
        self, params: FullACParams, backend: Backend | None = None, *, warns_of_groups: bool = True
    ) -> None:
        if backend is not None:
            check_backend(backend)
        self.params, self.counts = params, CheckpointCounts()
        self.stash: ActivationStash | None = None
        self._warns_of_groups = warns_of_groups
        self._kept, self._offloaded = params.kept_ops(), params.offloaded_ops()
        self._is_checked = self._has_warned_of_cache = False
        if params.offload_inputs or self._offloaded:
            smallest = params.min_offload_size
            self.stash = ActivationStash(
                "checkpoints", params.config, min_offload_size=smallest, backend=backend
            )

    def __deepcopy__(self, memo: object) -> Recompute:
        return self  # copies of a model share what moves their tensors

    def __reduce__(self) -> Any:
        if self in _of_default:
            return shared_for, (self.params,)
        raise TypeError(
            "a model with checkpoints of pp_offload cannot be pickled: streams and host memory "
            "belong to it; save model.state_dict(), whose names are those without checkpoints"
        )

    @never_compiled
    def begin(self) -> None:
        if self.stash is not None:
            self.stash.begin()

    def check_idle(self) -> None:
        """Warn, once, if the checkpoints so far should have offloaded tensors, but did not."""
        stash, num_calls = self.stash, self.counts.forward_calls
        if stash is None or self._is_checked or not num_calls:
            return
        self._is_checked = True
        if stash.statistics().bytes_offloaded == 0:
            ops = f", or of {sorted(map(str, self._offloaded))}" if self._offloaded else ""
            warnings.warn(
                f"{num_calls} checkpoints offloaded nothing: there was no input{ops} of at least "
                f"{stash.min_offload_size} bytes on the device that no operator wrote into; lower "
                "min_offload_size, or name operators that the layers call",
                stacklevel=2,
            )

    @never_compiled
    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` under a checkpoint; call it plainly without grad or while recorded. A
        compiled model runs this uncompiled; a layer inside has to be compiled on its own.
        """
        if not self._warns_of_groups:
            function = partial(expected, function)
        if not torch.is_grad_enabled() or records_operators():
            return function(*args, **kwargs)
        if self.stash is not None and self.stash.is_over and not is_recomputing():
            self.stash.begin()
        self.counts.forward_calls += 1
        pack = None
        if self.stash is not None and self.params.offload_inputs:
            # For the last condition see NOTE [ Recorded operators ].
            if not is_left_to_checkpoint() and not is_transformed():
                pack = PackHook(self.stash.pack)
        outputs = saving(pack, self._checkpoint, function, args, kwargs)
        if self.stash is not None:
            self.stash.send()
        return outputs

    def _checkpoint(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Hand a call to PyTorch's checkpoint, which runs it now, and again in backward. The first
        run gets the very objects of the call, and may fill a list in them; later runs get
        containers like those, with the tensors that the checkpoint saved.
        """
        leaves, tree = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        first = [(args, kwargs)]
        modules = modules_of(function, *others)
        name = f"a layer {type(modules[0]).__name__}" if len(modules) == 1 else "a function"
        self._warn_of_cache(name, modules, others)
        before = ModuleState(modules)
        outputs = None
        if self._kept:
            given = self._kept, self._offloaded, self.stash, self.counts
            outputs = KeptOutputs(*given, preserve_rng_state=self.params.preserve_rng_state)

        def run(*tensors: Tensor) -> Any:
            if first:
                if self.stash is not None:
                    self.stash.send()
                args, kwargs = first.pop()
                with outputs or nullcontext():
                    return function(*args, **kwargs)
            self.counts.recomputed_calls += 1
            rest = iter(tensors)
            filled = [next(rest) if leaf is _TENSOR else leaf for leaf in others]
            args, kwargs = tree_unflatten(filled, tree)
            with before.restored(), Recomputation(outputs) if outputs else nullcontext():
                return function(*args, **kwargs)

        options: dict[str, Any] = {"preserve_rng_state": self.params.preserve_rng_state}
        if self.params.use_reentrant:
            return _run_reentrant(run, name, modules, tensors, **options)
        options["determinism_check"] = self.params.determinism_check
        options["early_stop"] = self.params.early_stop and not before.draws_after_saving
        return checkpoint(run, *tensors, use_reentrant=False, **options)

    def _warn_of_cache(self, name: str, modules: list[Module], others: list[Any]) -> None:
        """Warn of a cache: Hugging Face's checkpoints leave it out; ours must not fill it twice."""
        cache = next(filter(_is_cache, others), None)
        is_only_read = any(getattr(each, "_can_checkpoint_with_cache", False) for each in modules)
        if cache is None or is_only_read or self._has_warned_of_cache:
            return
        self._has_warned_of_cache = True
        warnings.warn(
            f"{name} is checkpointed and was given a {type(cache).__name__}, which backward fills "
            "a second time, so gradients may be wrong; set model.config.use_cache = False, or call "
            "the model with use_cache=False",
            stacklevel=3,
        )


_TENSOR = object()  # placeholder for a tensor among arguments


def _run_reentrant(
    run: Callable[..., Any], name: str, modules: list[Module], tensors: list[Tensor], **options: Any
) -> Any:
    """Run a call under PyTorch's older checkpoint, and add what that lacks: outputs may be a tree,
    and no input needs a gradient if parameters do.
    """
    trees: list[Any] = []
    has_parameters = any(p.requires_grad for module in modules for p in module.parameters())
    if has_parameters and not any(tensor.requires_grad for tensor in tensors):
        tensors = [*tensors, torch.empty(0, requires_grad=True, device="cpu")]

    def run_flat(*tensors: Tensor) -> tuple[Any, ...]:
        leaves, tree = tree_flatten(run(*tensors))
        for leaf in leaves:
            if is_dataclass(leaf):
                raise TypeError(
                    f"{name} under a reentrant checkpoint returns a {type(leaf).__name__}, "
                    "whose tensors would get no gradient; give use_reentrant=False"
                )
        trees.append(tree)
        return tuple(leaves)

    outputs = checkpoint(run_flat, *tensors, use_reentrant=True, **options)
    return tree_unflatten(outputs, trees[0])


def modules_of(*values: object) -> list[Module]:
    """Return modules that these functions and arguments are or hold, as far as visible."""
    visited: dict[int, object] = {}
    to_visit = list(values)
    while to_visit:
        value = to_visit.pop()
        if id(value) not in visited and not isinstance(value, Module):
            to_visit += _parts(value)
        visited[id(value)] = value
    return [value for value in visited.values() if isinstance(value, Module)]


def _parts(value: object) -> Iterable[object]:
    match value:
        case MethodType():
            return value.__self__, value.__func__
        case partial():
            return value.func, *value.args, *value.keywords.values()
        case FunctionType():
            names = map(value.__globals__.get, value.__code__.co_names)
            modules = [named for named in names if isinstance(named, Module)]
            return *(value.__closure__ or ()), *(value.__defaults__ or ()), *modules
        case CellType():
            return [value.cell_contents] if value != CellType() else ()  # else not assigned yet
        case dict():
            return list(value.values())
        case list() | tuple() if len(value) <= 1000:  # a longer one holds data
            return value
    return ()


def _is_cache(value: object) -> bool:
    # Compared by name: importing transformers takes long, and few models need it.
    kinds = ((kind.__module__, kind.__name__) for kind in type(value).__mro__)
    return ("transformers.cache_utils", "Cache") in kinds


def shared_for(params: FullACParams, backend: Backend | None = None) -> Recompute:
    """Return the engine for these options; make it if needed."""
    if backend is None:
        engines = _of_default
    else:
        check_backend(backend)
        # A table of ours would keep both for good; setattr would fail where it is frozen.
        engines = vars(backend).setdefault("_pp_offload_checkpoints", [])
    with _lock:
        for engine in engines:
            if engine.params == params:
                return engine
        engines.append(Recompute(params, backend))
        return engines[-1]
