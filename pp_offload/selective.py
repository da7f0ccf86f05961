"""What a checkpoint keeps of the operators inside: outputs saved, offloaded, or computed again.

PyTorch's selective checkpointing saves and recomputes. Beside it stand two modes: in forward one
that sends what was chosen for offload to a stash, in recomputation one that brings it.

            forward                                recomputation
    op -> [sends] -> [PyTorch's: saves] -> run     op -> [PyTorch's: saved?] -> [brings] -> run

PyTorch is told that an offloaded output is to be computed again, so its own mode lets that call
through, and the one behind answers it. Calls are counted for each forward and each recomputation
apart.

NOTE [ Numbers not drawn ]
    An operator with dropout in it, such as attention, draws random numbers. Where its output is
    kept it is not run again and draws none, and what comes behind it would draw others than in
    forward. So the state of the generators behind it is noted in forward, and set in recomputation.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from pp_offload.random_state import RandomState
from pp_offload.saved import Packed, Resident
from pp_offload.stash import ActivationStash
from pp_offload.tensors import has_storage


class Choice(enum.Enum):
    """What becomes of an operator's output."""

    SAVE = "saved on the device"
    OFFLOAD = "offloaded"
    RECOMPUTE = "computed again"


@dataclass(frozen=True)
class OpPolicy:
    """Chooses by operator, and by how often it was called in this forward."""

    save: frozenset[OpOverload]
    """Operators whose outputs stay on the device."""

    offload: frozenset[OpOverload] = frozenset()
    """Operators whose outputs go to the tiers."""

    recompute_every: Mapping[OpOverload, int] = field(default_factory=dict)
    """Of the operators above, those of which every n-th call is computed again."""

    def choose(self, op: OpOverload, number: int) -> Choice:
        """What becomes of the output of the ``number``-th call of ``op``, from 1 on."""
        every = self.recompute_every.get(op)
        if every is not None and number % every == 0:
            return Choice.RECOMPUTE
        if op in self.offload:
            return Choice.OFFLOAD
        return Choice.SAVE if op in self.save else Choice.RECOMPUTE

    @property
    def kept_that_draw(self) -> frozenset[OpOverload]:
        """Operators that may draw random numbers, of those that may be kept."""
        drawing = torch.Tag.nondeterministic_seeded
        return frozenset(op for op in self.save | self.offload if drawing in op.tags)


@dataclass
class CheckpointCounts:
    """What checkpoints did since they were applied."""

    forward_calls: int = 0
    """Checkpointed functions that a forward with gradients ran."""

    recomputed_calls: int = 0
    """Those that backward ran again."""

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


class KeptOutputs:
    """Of one forward, the outputs that are not computed again.

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
        self._stash = stash
        self._counts = counts
        self._choices = choices = _Choices(policy)
        self._passed: defaultdict[OpOverload, list[Any]] = defaultdict(list)
        self._num_answered: Counter[OpOverload] = Counter()
        self._saves, self._saved = create_selective_checkpoint_contexts(choices.ask)
        self._draws = policy.kept_that_draw if preserve_rng_state else frozenset()
        self._drawn: list[RandomState | None] = []
        self._num_drawn = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """What the forward runs in."""
        with self._saves, _Calls(self._send):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """What a recomputation runs in; there may be several."""
        self._choices.begin_again()
        self._num_answered.clear()
        self._num_drawn = 0
        draws = _Calls(self._draw_as_before) if self._draws else nullcontext()
        with _Calls(self._answer), self._saved, draws:
            yield

    def _send(self, op: Any, args: Any, kwargs: Any) -> Any:
        choices = self._choices
        choices.last = None
        outputs = op(*args, **kwargs)  # PyTorch asks meanwhile, about those it handles
        if choices.last is Choice.RECOMPUTE:
            self._passed[op].append(None)
        elif choices.last is Choice.OFFLOAD:
            self._passed[op].append(tree_map_only(Tensor, self._pack, outputs))
        elif choices.last is Choice.SAVE:
            tree_map_only(Tensor, self._count_saved, outputs)
        if op in self._draws:
            is_kept = choices.last is not Choice.RECOMPUTE
            self._drawn.append(RandomState.after(outputs) if is_kept else None)
        return outputs

    def _draw_as_before(self, op: Any, args: Any, kwargs: Any) -> Any:
        """See NOTE [ Numbers not drawn ]."""
        outputs = op(*args, **kwargs)
        if op in self._draws and self._num_drawn < len(self._drawn):
            state = self._drawn[self._num_drawn]
            self._num_drawn += 1
            if state is not None:
                state.set()
        return outputs

    def _answer(self, op: Any, args: Any, kwargs: Any) -> Any:
        passed = self._passed.get(op, ())
        number = self._num_answered[op]
        self._num_answered[op] += 1
        if number < len(passed):
            if passed[number] is not None:
                return tree_map_only(Packed, _fresh, passed[number])
            self._counts.recomputed_ops += 1
        return op(*args, **kwargs)

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

    def _count_saved(self, tensor: Tensor) -> None:
        self._counts.saved_outputs += 1
        self._counts.saved_bytes += tensor.nbytes if has_storage(tensor) else 0


class _Choices:
    """Asked by PyTorch, which holds it, in forward and, in older versions, when it recomputes."""

    def __init__(self, policy: OpPolicy) -> None:
        self.last: Choice | None = None
        self._policy = policy
        self._num_asked: dict[bool, Counter[OpOverload]] = {False: Counter(), True: Counter()}

    def begin_again(self) -> None:
        """A recomputation begins."""
        self._num_asked[True].clear()

    def ask(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Whether PyTorch is to save; :attr:`last` says what else there is."""
        num_asked = self._num_asked[context.is_recompute]
        num_asked[op] += 1
        self.last = self._policy.choose(op, num_asked[op])
        is_saved = self.last is Choice.SAVE
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


class _Calls(TorchDispatchMode):
    """Operators are run by ``run`` inside."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})


def _fresh(packed: Packed) -> Tensor:
    """The tensor, new to autograd, which is about to see it as an operator's output."""
    with torch.no_grad():
        tensor = packed.unpack()
    with _same_version_counter():
        return tensor.detach()


def _same_version_counter() -> Any:
    """Below autograd, an alias counts versions of its own; not so inside."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)
