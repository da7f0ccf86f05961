"""Activation checkpoints: PyTorch's, with inputs that may go to the tiers.

A tensor anywhere in the arguments is handed to :func:`torch.utils.checkpoint.checkpoint` as one
that it saves, so it passes the hooks of autograd, and with a stash it leaves the device. A function
that runs again sees its modules' buffers as they were, and changes none.

    recompute = Recompute(ActivationStash("inputs"))
    y = recompute(layer, x, mask=mask)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.checkpoint import checkpoint

from pp_offload._activations.stash import ActivationStash
from pp_offload._checkpoint.module_state import BufferMemory
from pp_offload._checkpoint.modules_of import modules_of
from pp_offload._checkpoint.selective import CheckpointCounts, KeptOutputs, OpPolicy
from pp_offload._common.torch_private import (
    is_transformed,
    never_compiled,
    records_operators,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from pp_offload._hooks.hook_scopes import saving
from pp_offload._hooks.regions import PackHook, expected, is_left_to_checkpoint, is_recomputing


class Recompute:
    """Runs functions under a checkpoint.

    Args:
        stash: Takes inputs, and outputs of operators to offload; None keeps them on the device.
        policy: Which operators' outputs are not recomputed; None recomputes all.
        offload_inputs: Whether inputs go to the stash.
        use_reentrant: PyTorch's older way, which runs backward inside backward; takes no policy.
        preserve_rng_state: Draw the same random numbers again.
        determinism_check: ``default`` compares shapes, dtypes and devices; ``none`` nothing.
        early_stop: Stop as soon as what backward needs is there; not for the older way.
        warns_of_groups: Whether a warning says that groups inside do nothing.

    Attributes:
        counts: What was done so far.
        warns_of_groups: See above.
    """

    def __init__(
        self,
        stash: ActivationStash | None = None,
        *,
        policy: OpPolicy | None = None,
        offload_inputs: bool = True,
        use_reentrant: bool = False,
        preserve_rng_state: bool = True,
        determinism_check: str = "default",
        early_stop: bool = True,
        warns_of_groups: bool = True,
    ) -> None:
        self.warns_of_groups = warns_of_groups
        self.counts = CheckpointCounts()
        self.stash = stash
        self._policy = policy
        self._inputs = stash if offload_inputs else None
        self._use_reentrant = use_reentrant
        self._options: dict[str, Any] = {"preserve_rng_state": preserve_rng_state}
        if not use_reentrant:
            self._options |= {"determinism_check": determinism_check, "early_stop": early_stop}
        self._buffers = BufferMemory()
        self._is_checked = False
        self._has_warned_of_cache = False

    def __deepcopy__(self, memo: object) -> Recompute:
        """A copy of a model shares what moves its tensors."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a model with checkpoints of pp_offload cannot be pickled, for streams and host memory "
            "are part of it; save model.state_dict(), whose names are those without checkpoints"
        )

    @never_compiled
    def begin(self) -> None:
        """The forward of a microbatch begins."""
        if self.stash is not None:
            self.stash.begin()

    def check_idle(self) -> None:
        """Warn, once, if the checkpoints so far offloaded nothing, but should have."""
        stash = self.stash
        if stash is None or self._is_checked or not self.counts.forward_calls:
            return
        self._is_checked = True
        if stash.statistics().bytes_offloaded == 0:
            chosen = (
                "" if self._policy is None else f", or of {sorted(map(str, self._policy.offload))}"
            )
            num_written = self.counts.written_outputs
            warnings.warn(
                f"{self.counts.forward_calls} checkpoints offloaded nothing: there was no input"
                f"{chosen} of at least {stash.min_offload_size} bytes on the device"
                f"{f' that no operator wrote into, as into {num_written}' if num_written else ''}; "
                "lower min_offload_size, or name operators that the layers call",
                stacklevel=2,
            )

    @never_compiled
    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` under a checkpoint; as it is without grad, or where it is recorded.

        A compiled model runs this uncompiled; a layer inside has to be compiled on its own.
        """
        if not torch.is_grad_enabled() or records_operators():
            return function(*args, **kwargs)
        if self.stash is not None and self.stash.is_over and not is_recomputing():
            self.stash.begin()
        self.counts.forward_calls += 1
        call = _Call(function, args, kwargs)
        if not self._has_warned_of_cache:
            self._warn_of_cache(call)
        run = self._reentrant if self._use_reentrant else self._non_reentrant
        outputs = saving(self._pack(), run, call, call.tensors())
        self._send()
        return outputs

    def _warn_of_cache(self, call: _Call) -> None:
        """Hugging Face's own checkpoints leave a cache out; it must not reach one of these."""
        cache, layers = call.cache(), call.modules
        if cache is None or any(getattr(one, "_can_checkpoint_with_cache", 0) for one in layers):
            return
        self._has_warned_of_cache = True
        name = f"layer {type(layers[0]).__name__}" if len(layers) == 1 else "function"
        warnings.warn(
            f"a {name} is checkpointed and was given a {type(cache).__name__} to fill: where "
            "backward runs it again, it fills that a second time, so gradients may be wrong and "
            "nothing says so, or backward fails; set model.config.use_cache = False for training, "
            "or call the model with use_cache=False",
            stacklevel=3,
        )

    def _non_reentrant(self, call: _Call, tensors: list[Tensor]) -> Any:
        before = self._buffers.of(call.modules)
        kept = self._kept_outputs()
        groups = nullcontext if self.warns_of_groups else expected

        @contextmanager
        def first() -> Iterator[None]:
            self._send()
            with groups(), before.taken(), kept.forward() if kept else nullcontext():
                yield

        @contextmanager
        def again() -> Iterator[None]:
            self.counts.recomputed_calls += 1
            with groups(), before.restored(), kept.again() if kept else nullcontext():
                yield

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return first(), _Anew(again)

        options = {"use_reentrant": False, "context_fn": contexts, **self._options}
        if before.draws_after_saving:
            options["early_stop"] = False
        return checkpoint(call, *tensors, **options)

    def _reentrant(self, call: _Call, tensors: list[Tensor]) -> Any:
        """Outputs may be a tree here, too; and inputs need no gradient if parameters do."""
        before = self._buffers.of(call.modules)
        num_tensors = len(tensors)
        trees: list[Any] = []

        def run(*tensors: Tensor) -> tuple[Any, ...]:
            with before.restored() if trees else before.taken():
                self.counts.recomputed_calls += bool(trees)
                leaves, tree = tree_flatten(call(*tensors[:num_tensors]))
            if not trees and (is_input_tracked or has_parameters):
                _check_outputs(leaves, call.modules)
            trees.append(tree)
            return tuple(leaves)

        has_parameters = _have_parameters(call.modules)
        is_input_tracked = any(tensor.requires_grad for tensor in tensors)
        if has_parameters and not is_input_tracked:
            tensors = [*tensors, torch.empty(0, requires_grad=True, device="cpu")]
        outputs = checkpoint(run, *tensors, use_reentrant=True, **self._options)
        return tree_unflatten(outputs, trees[0])

    def _kept_outputs(self) -> KeptOutputs | None:
        if self._policy is None or not self._policy.kept:
            return None
        preserve = self._options["preserve_rng_state"]
        return KeptOutputs(self._policy, self.stash, self.counts, preserve_rng_state=preserve)

    def _pack(self) -> PackHook | None:
        """The hook that saves inputs; None where they stay."""
        if self._inputs is None or is_left_to_checkpoint() or is_transformed():
            return None  # for the last one see NOTE [ Recorded operators ]
        return PackHook(self._inputs.pack)

    def _send(self) -> None:
        if self.stash is not None:
            self.stash.send()


class _Call:
    """A function with arguments, whose tensors come from the checkpoint when it is run again.

    The first run gets the very objects of the call, and may fill a list in them; later runs get
    containers like those.

    Attributes:
        modules: Those it computes with, as far as one can see.
    """

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._function = function
        self._first: tuple[Any, Any] | None = (args, kwargs)
        leaves, self._tree = tree_flatten((args, kwargs))
        self._others = [_HOLE if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.modules = modules_of(function, *self._others)

    def tensors(self) -> list[Tensor]:
        """The tensors in the arguments. To be asked before the first run."""
        assert self._first is not None, "it was run"
        return [leaf for leaf in tree_flatten(self._first)[0] if isinstance(leaf, Tensor)]

    def cache(self) -> object | None:
        """A cache of keys and values among its arguments, of a decoder of Hugging Face."""
        return next((leaf for leaf in self._others if _is_cache(leaf)), None)

    def __call__(self, *tensors: Tensor) -> Any:
        """What the function returns, with ``tensors`` in their places."""
        first, self._first = self._first, None
        if first is None:
            rest = iter(tensors)
            leaves = [next(rest) if one is _HOLE else one for one in self._others]
            first = tree_unflatten(leaves, self._tree)
        args, kwargs = first
        del first
        return self._function(*args, **kwargs)


_HOLE = object()


class _Anew:
    """A context that may be entered any number of times, one after the other."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        self._entered = self._make()
        self._entered.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._entered.__exit__(kind, error, trace)


def _have_parameters(modules: Iterable[Module]) -> bool:
    """Whether gradients flow to parameters of theirs."""
    return any(p.requires_grad for module in modules for p in module.parameters())


def _check_outputs(leaves: Sequence[Any], modules: Sequence[Module]) -> None:
    """Refuse outputs that a reentrant checkpoint would leave without gradients, and say nothing.

    Raises:
        TypeError: A tensor is in an object that is no tree.
    """
    for leaf in leaves:
        for field in fields(leaf) if is_dataclass(leaf) and not isinstance(leaf, type) else ():
            tensors = [one for one in tree_leaves(getattr(leaf, field.name)) if _is_float(one)]
            if tensors:
                of = f"a {type(modules[0]).__name__}" if modules else "a function"
                raise TypeError(
                    f"{of} under a reentrant checkpoint returns a {type(leaf).__name__} with the "
                    f"tensor '{field.name}', which would get no gradient; expected tensors, or "
                    "tuples, lists and dictionaries of them; give use_reentrant=False, or make the "
                    "class known with torch.utils._pytree.register_dataclass"
                )


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_cache(value: object) -> bool:
    # By name: importing transformers takes long, and few models are made with it.
    found = ((kind.__module__, kind.__name__) for kind in type(value).__mro__)
    return ("transformers.cache_utils", "Cache") in found
