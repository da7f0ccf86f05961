"""What a checkpoint keeps of the operators inside: outputs saved, offloaded, or recomputed.

PyTorch's selective checkpointing has a dispatch mode for the forward and one for the recomputation.
When an output is there, the forward's mode asks what is to become of it; an output to be offloaded
goes to a stash then, and PyTorch is told to recompute it. If an output was offloaded, or a kept
operator drew random numbers, a mode derived from PyTorch's runs the recomputation: it brings these
outputs, and sets the generators. Where nothing is ever kept there is no mode, for each costs time
at every operator.

NOTE [ Numbers not drawn ]
    An operator with dropout in it, such as attention, draws random numbers. If its output is kept
    it does not run again and draws none, and operators behind it would draw others than in forward.
    So the state of the generators behind it is noted in forward, and set in recomputation.
"""

from __future__ import annotations

import enum
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
)

from pp_offload._checkpoint.random_state import RandomState
from pp_offload._common.torch_private import (
    CachedTorchDispatchMode,
    CachingTorchDispatchMode,
    DispatchKey,
    OpOverload,
    SetExcludeDispatchKeyGuard,
    tree_leaves,
    tree_map_only,
)
from pp_offload._groups.stash import ActivationStash
from pp_offload._memory.storages import has_storage
from pp_offload._transfer.saved_tensor import Packed, Resident


class Choice(enum.Enum):
    """What becomes of an operator's output."""

    SAVE = "saved on the device"
    OFFLOAD = "offloaded"
    RECOMPUTE = "recomputed"


@dataclass(frozen=True)
class OpPolicy:
    """Chooses by operator, and by how often it was called in this forward."""

    save: frozenset[OpOverload]
    """Operators whose outputs stay on the device."""

    offload: frozenset[OpOverload] = frozenset()
    """Operators whose outputs go to the tiers."""

    recompute_every: Mapping[OpOverload, int] = field(default_factory=dict)
    """For some of the operators above, n: every n-th call is recomputed."""

    def choose(self, op: OpOverload, number: int) -> Choice:
        """What becomes of the output of the ``number``-th call of ``op``, from 1 on."""
        every = self.recompute_every.get(op)
        if every is not None and number % every == 0:
            return Choice.RECOMPUTE
        if op in self.offload:
            return Choice.OFFLOAD
        return Choice.SAVE if op in self.save else Choice.RECOMPUTE

    @functools.cached_property
    def kept(self) -> frozenset[OpOverload]:
        """Operators of which some output is kept, if they are called often enough."""
        return frozenset(op for op in self.save | self.offload if self.recompute_every.get(op) != 1)

    @functools.cached_property
    def kept_that_draw(self) -> frozenset[OpOverload]:
        """Those of them that may draw random numbers."""
        drawing = torch.Tag.nondeterministic_seeded
        return frozenset(op for op in self.kept if drawing in op.tags)


@dataclass
class CheckpointCounts:
    """What checkpoints did since they were applied."""

    forward_calls: int = 0
    """Checkpointed functions that a forward with gradients ran."""

    recomputed_calls: int = 0
    """Checkpointed functions that backward ran again."""

    recomputed_ops: int = 0
    """Operators that selective checkpoints ran again."""

    saved_outputs: int = 0
    """Outputs of chosen operators that stayed on the device until backward."""

    saved_bytes: int = 0
    """Bytes of these, as far as they are dense."""

    offloaded_outputs: int = 0
    """Outputs of chosen operators that went to the tiers."""

    offloaded_bytes: int = 0
    """Bytes of these, shared ones counted each time."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A call whose output is not recomputed."""

    packed: Any = None
    """Its output, if that was offloaded; else PyTorch has it."""

    drawn: RandomState | None = None
    """The generators behind it, if it may have drawn. See NOTE [ Numbers not drawn ]."""

    @property
    def is_brought(self) -> bool:
        """Whether PyTorch's own mode cannot answer it."""
        return self.packed is not None or self.drawn is not None


_Calls = dict[OpOverload, list[_Kept | None]]
"""For each operator that may be kept, its calls in the forward; None for one recomputed."""


class KeptOutputs:
    """The outputs of one forward that are not recomputed.

    Args:
        policy: Chooses them.
        stash: Takes those to offload.
        counts: Told what was chosen.
        preserve_rng_state: Draw the same random numbers again.
    """

    def __init__(
        self,
        policy: OpPolicy,
        stash: ActivationStash | None,
        counts: CheckpointCounts,
        *,
        preserve_rng_state: bool,
    ) -> None:
        self._policy = policy
        self._stash = stash
        self._counts = counts
        self._draws = policy.kept_that_draw if preserve_rng_state else frozenset()
        self._calls: _Calls = {op: [] for op in policy.kept}
        self._saved: defaultdict[Any, dict[int, Any]] = defaultdict(dict)
        self._is_brought = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The context that the forward runs in."""
        with _Saves(self._choose, self._saved):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """The context that a recomputation runs in; there may be several."""
        mode = _Brings(self._saved, self._calls) if self._is_brought else _Answers(self._saved)
        try:
            with mode:
                yield
        finally:
            self._counts.recomputed_ops += mode.num_run(self._calls)

    def _choose(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Tell PyTorch whether to save an output, which was computed."""
        calls = self._calls.get(op)
        if calls is None:  # as for most operators
            return CheckpointPolicy.PREFER_RECOMPUTE
        choice = self._policy.choose(op, len(calls) + 1)
        kept = None if choice is Choice.RECOMPUTE else self._keep(op, choice, context.op_output)
        calls.append(kept)
        self._is_brought = self._is_brought or (kept is not None and kept.is_brought)
        return _ANSWERS[choice]

    def _keep(self, op: OpOverload, choice: Choice, outputs: Any) -> _Kept:
        packed = None
        if choice is Choice.OFFLOAD:
            packed = tree_map_only(Tensor, self._pack, outputs)
        else:
            self._count_saved(outputs)
        return _Kept(packed, RandomState.after(outputs) if op in self._draws else None)

    def _pack(self, tensor: Tensor) -> Packed:
        assert self._stash is not None
        with _same_version_counter():
            packed = self._stash.pack(tensor)
        if isinstance(packed, Resident):
            self._count_saved(tensor)
        else:
            self._counts.offloaded_outputs += 1
            self._counts.offloaded_bytes += tensor.nbytes
        return packed

    def _count_saved(self, outputs: Any) -> None:
        for tensor in (outputs,) if isinstance(outputs, Tensor) else tree_leaves(outputs):
            if isinstance(tensor, Tensor):
                self._counts.saved_outputs += 1
                self._counts.saved_bytes += tensor.nbytes if has_storage(tensor) else 0


_ANSWERS = {
    Choice.SAVE: CheckpointPolicy.MUST_SAVE,
    Choice.OFFLOAD: CheckpointPolicy.PREFER_RECOMPUTE,
    Choice.RECOMPUTE: CheckpointPolicy.PREFER_RECOMPUTE,
}
"""What PyTorch is told."""


class _Saves(CachingTorchDispatchMode):
    """PyTorch's mode of a forward. Compiled code inside runs uncompiled: operators are named as in
    the code, and a compiler makes others of them.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return False


class _Answers(CachedTorchDispatchMode):
    """PyTorch's mode of a recomputation."""

    def __init__(self, saved: defaultdict[Any, dict[int, Any]]) -> None:
        super().__init__(None, saved)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return False

    def num_run(self, kept: _Calls) -> int:
        """Operators that were asked for and run again."""
        asked = self.func_counter
        answered = (call for op, calls in kept.items() for call in calls[: asked.get(op, 0)])
        return sum(asked.values()) - sum(call is not None for call in answered)


class _Brings(_Answers):
    """One that also brings what was offloaded, and sets the generators to where a kept call left
    them.

    Args:
        saved: What PyTorch saved.
        kept: What became of the calls of the forward.
    """

    def __init__(self, saved: defaultdict[Any, dict[int, Any]], kept: _Calls) -> None:
        super().__init__(saved)
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        calls = self._kept.get(func, ())
        number = self.func_counter[func] if calls else 0
        call = calls[number] if number < len(calls) else None
        if call is None or call.packed is None:
            outputs = super().__torch_dispatch__(func, types, args, kwargs)
        else:
            self.func_counter[func] += 1
            outputs = tree_map_only(Packed, _fresh, call.packed)
        if call is not None and call.drawn is not None:
            call.drawn.set()
        return outputs


def _fresh(packed: Packed) -> Tensor:
    """The tensor, new to autograd, which is about to see it as an operator's output."""
    with torch.no_grad():
        tensor = packed.unpack()
    with _same_version_counter():
        return tensor.detach()


def _same_version_counter() -> Any:
    """Inside, an alias shares its tensor's version counter even below autograd."""
    return SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False)
