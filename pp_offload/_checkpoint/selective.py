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

NOTE [ Written in place ]
    An operator of the same checkpoint may write into an output that is kept, as ``relu_`` does
    behind a linear layer; recomputation would write into what was written. The cells of ``nn.GRU``
    do so through ``unsafe_chunk``, whose parts have version counters of their own, so no counter
    tells. So each operator that writes is looked at: what it writes into is recomputed after all.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils.checkpoint import CheckpointPolicy

from pp_offload._activations.stash import ActivationStash
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
from pp_offload._core.saved import Packed, Resident
from pp_offload._core.subclasses import plain_tensors
from pp_offload._memory.storages import has_storage


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

    written_outputs: int = 0
    """Outputs of chosen operators that another one wrote into, and that were recomputed for that.
    """

    def add(self, counted: Iterable[tuple[bool, int]], num: int = 1) -> None:
        """Tensors were kept: of each whether it was offloaded, and its bytes. With ``num=-1`` they
        were not, after all.
        """
        for is_offloaded, nbytes in counted:
            if is_offloaded:
                self.offloaded_outputs += num
                self.offloaded_bytes += num * nbytes
            else:
                self.saved_outputs += num
                self.saved_bytes += num * nbytes


@dataclass(frozen=True, slots=True)
class _Kept:
    """A call whose output is not recomputed."""

    packed: Any = None
    """Its output, if that was offloaded; else PyTorch has it."""

    drawn: RandomState | None = None
    """The generators behind it, if it may have drawn. See NOTE [ Numbers not drawn ]."""

    counted: tuple[tuple[bool, int], ...] = ()
    """Of each tensor whether it was offloaded, and its bytes."""

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
        self._in_storage: _InStorage = {}

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
        if self._in_storage:
            self._drop_what_is_written(op, args, kwargs)
        if calls is None:  # as for most operators
            return CheckpointPolicy.PREFER_RECOMPUTE
        choice = self._policy.choose(op, len(calls) + 1)
        if choice is Choice.RECOMPUTE:
            calls.append(None)
        else:
            kept = self._keep(op, choice, context.op_output)
            calls.append(kept)
            self._is_brought = self._is_brought or kept.is_brought
        return _ANSWERS[choice]

    def _keep(self, op: OpOverload, choice: Choice, outputs: Any) -> _Kept:
        counted: list[tuple[bool, int]] = []

        def pack(tensor: Tensor) -> Packed | None:
            packed = self._pack(tensor) if choice is Choice.OFFLOAD else None
            is_offloaded = packed is not None and not isinstance(packed, Resident)
            counted.append((is_offloaded, tensor.nbytes if has_storage(tensor) else 0))
            self._note_storages(tensor, op)
            return packed

        packed = tree_map_only(Tensor, pack, outputs)
        self._counts.add(counted)
        drawn = RandomState.after(outputs) if op in self._draws else None
        return _Kept(packed if choice is Choice.OFFLOAD else None, drawn, tuple(counted))

    def _pack(self, tensor: Tensor) -> Packed:
        assert self._stash is not None
        with _same_version_counter():
            return self._stash.pack(tensor)

    def _note_storages(self, tensor: Tensor, op: OpOverload) -> None:
        """Of an output of the call of ``op`` that is being noted."""
        for plain in filter(has_storage, plain_tensors(tensor)):
            storage = plain.untyped_storage()
            calls = self._in_storage.setdefault(storage._cdata, [])
            calls.append((weakref.ref(storage), op, len(self._calls[op])))

    def _drop_what_is_written(self, op: Any, args: Any, kwargs: Any) -> None:
        """See NOTE [ Written in place ]."""
        places, names = _written(op)
        if not places:  # as of most operators
            return
        given = [args[i] for i in places if i < len(args)]
        for tensor in tree_leaves([*given, *(kwargs[name] for name in names if name in kwargs)]):
            for plain in plain_tensors(tensor) if isinstance(tensor, Tensor) else ():
                if has_storage(plain):
                    self._drop(plain.untyped_storage())

    def _drop(self, storage: UntypedStorage) -> None:
        """Have the outputs in a storage recomputed after all."""
        for ref, op, number in self._in_storage.pop(storage._cdata, ()):
            kept = self._calls[op][number]
            if ref() is storage and kept is not None:
                self._counts.add(kept.counted, -1)
                self._counts.written_outputs += len(kept.counted)
                self._calls[op][number] = None
                self._saved[op].pop(number, None)
                self._is_brought = True  # PyTorch's own mode would look for it


_InStorage = dict[int, list[tuple[weakref.ref[UntypedStorage], OpOverload, int]]]
"""By the key of a storage, the calls whose kept outputs are in it."""


@functools.cache
def _written(op: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Which arguments an operator writes into, by place and by name."""
    schema = getattr(op, "_schema", None)  # which an operator of a higher order has not
    if schema is None or not schema.is_mutable:
        return (), ()
    found = [
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tuple(place for place, _ in found), tuple(name for _, name in found)


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
        if call is None and number < len(calls):
            self.func_counter[func] += 1
            return func(*args, **(kwargs or {}))
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
