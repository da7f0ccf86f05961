"""Outputs of chosen operators in a checkpoint: saved or offloaded, and not recomputed.

A dispatch mode around the forward saves or offloads the outputs of these operators. A dispatch mode
around the recomputation answers the same calls with these outputs, and runs all others.

    outputs = KeptOutputs(kept, offloaded, stash, counts, preserve_rng_state=True)
    with outputs:
        y = function(x)
    with Recomputation(outputs):  # in backward, any number of times
        function(x)

NOTE [ Numbers not drawn ]
    An operator with dropout inside, such as attention, draws random numbers. If its output is kept,
    the operator does not run again and draws none, so later operators would draw other numbers
    than in the forward. The generators' state after the operator is saved, and set again.

NOTE [ Written in place ]
    An operator of the same checkpoint may write into a kept output, as ``relu_`` does behind a
    linear layer; the recomputation would then write into it a second time. The cells of ``nn.GRU``
    do so through ``unsafe_chunk``, whose parts have version counters of their own, so no counter
    shows it. Every writing operator is checked: an output that it writes into is recomputed. It
    runs again itself, or what it writes would be missing.

NOTE [ Cached casts ]
    The cache of autocast decides whether a weight is cast: not if an earlier call in the same
    ``autocast`` did it. The recomputation starts with another cache, so the n-th cast of the
    forward is not its n-th. If the cache is on, casts are recomputed, although they are to be kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage
from torch.utils.checkpoint import SAC_IGNORED_OPS, get_device_states, set_device_states

from pp_offload._activations import ActivationStash
from pp_offload._common.operators import operator
from pp_offload._common.torch_private import (
    DispatchKey,
    OpOverload,
    SetExcludeDispatchKeyGuard,
    TorchDispatchMode,
    is_any_autocast_enabled,
    tree_leaves,
    tree_map_only,
)
from pp_offload._core.saved import Packed, Resident, plain_tensors
from pp_offload._memory.addresses import has_storage

CAST = torch.ops.aten._to_copy.default  # with which autocast casts


@dataclass
class CheckpointCounts:
    """Counts of checkpoints since they were applied to the model.

    Attributes:
        forward_calls: Checkpointed functions that a forward with gradients ran.
        recomputed_calls: Checkpointed functions that backward ran again.
        recomputed_ops: Operators that selective checkpoints ran again.
        saved_outputs: Outputs of chosen operators that stayed on the device until backward.
        saved_bytes: Bytes of the saved outputs, as far as they are dense.
        offloaded_outputs: Outputs of chosen operators that went to the tiers.
        offloaded_bytes: Bytes of the offloaded outputs; shared bytes are counted each time.
        written_outputs: Outputs of chosen operators that were recomputed because another operator
            wrote into them.
    """

    forward_calls: int = 0
    recomputed_calls: int = 0
    recomputed_ops: int = 0
    saved_outputs: int = 0
    saved_bytes: int = 0
    offloaded_outputs: int = 0
    offloaded_bytes: int = 0
    written_outputs: int = 0

    def add(self, call: KeptCall, num: int = 1) -> None:
        """Count the outputs of a kept call; ``num=-1`` takes them back: they are recomputed."""
        tensors = (leaf for leaf in tree_leaves(call.outputs) if isinstance(leaf, Packed))
        for packed, nbytes in zip(tensors, call.output_bytes, strict=True):
            if isinstance(packed, Resident):
                self.saved_outputs += num
                self.saved_bytes += num * nbytes
            else:
                self.offloaded_outputs += num
                self.offloaded_bytes += num * nbytes


@dataclass(frozen=True)
class KeptCall:
    """A call of an operator whose outputs are kept, with each tensor packed."""

    outputs: Any
    output_bytes: list[int]
    # Sets the random state after a call that may have drawn. See NOTE [ Numbers not drawn ].
    set_generators: Callable[[], None] | None


Calls = list[KeptCall | None]  # of an operator in the forward; None for one that is recomputed


class KeptOutputs(TorchDispatchMode):
    """Kept outputs of a checkpointed forward, which runs in this mode. Compiled code inside runs
    uncompiled: operators keep the names of the code, and a compiler would replace them. For an
    operator with a number n in ``kept``, every n-th call is recomputed.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        kept: Mapping[OpOverload, int | None],
        offloaded: Collection[OpOverload],
        stash: ActivationStash | None,
        counts: CheckpointCounts,
        *,
        preserve_rng_state: bool,
    ) -> None:
        super().__init__()
        self._kept, self._offloaded = kept, offloaded
        self._stash, self._counts = stash, counts
        self._preserve_rng_state = preserve_rng_state
        # See NOTE [ Cached casts ].
        self._has_cached = is_any_autocast_enabled() and torch.is_autocast_cache_enabled()
        ops = kept.keys() - ({CAST} if self._has_cached else ())
        self._calls: dict[Any, Calls] = {op: [] for op in ops}
        self._calls_in = WeakKeyDictionary[UntypedStorage, list[tuple[Calls, int]]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        calls = self._calls_of(func, args)
        if calls is not None:  # for most operators it is None
            calls.append(None)  # first: where it raises, later calls keep their numbers
        outputs = func(*args, **kwargs)
        written = written_arguments(func, args, kwargs)
        for storage in storages_of(written):  # see NOTE [ Written in place ]
            for earlier, number in self._calls_in.pop(storage, ()):
                call, earlier[number] = earlier[number], None
                if call is not None:
                    self._counts.add(call, -1)
                    self._counts.written_outputs += len(call.output_bytes)
        if calls is not None:
            pack = self._pack_of(func, args, kwargs, outputs)
            if pack is not None and not written:
                calls[-1] = self._keep(func, outputs, pack, calls)
        return outputs

    def _calls_of(self, op: Any, args: Any) -> Calls | None:
        """Return the calls so far; None if none is kept."""
        return self._calls.get(op)

    def _pack_of(self, op: Any, args: Any, kwargs: Any, outputs: Any) -> Any:
        """Return what packs the outputs of a call, tensor by tensor; None to recompute them."""
        every = self._kept[op]
        if every is not None and len(self._calls[op]) % every == 0:
            return None
        return self._stash.pack if self._stash and op in self._offloaded else Resident

    def _keep(self, op: Any, outputs: Any, pack: Any, calls: Calls) -> KeptCall:
        sizes: list[int] = []
        if pack is not Resident and op.namespace == "_c10d_functional":
            tree_map_only(Tensor, torch.ops._c10d_functional.wait_tensor, outputs)  # or it arrives

        def keep(tensor: Tensor) -> Packed:
            sizes.append(tensor.nbytes if has_storage(tensor) else 0)
            for storage in storages_of(tensor):
                self._calls_in.setdefault(storage, []).append((calls, len(calls) - 1))
            with same_version_counter():
                return pack(tensor)

        draws = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
        may_draw = draws and self._preserve_rng_state
        set_generators = _random_state_behind(outputs) if may_draw else None
        call = KeptCall(tree_map_only(Tensor, keep, outputs), sizes, set_generators)
        self._counts.add(call)
        return call


class Recomputation(TorchDispatchMode):
    """Answers the forward's calls with kept outputs, and runs all others."""

    supports_higher_order_operators = True

    def __init__(self, outputs: KeptOutputs) -> None:
        super().__init__()
        self._calls, self._counts = outputs._calls, outputs._counts

    def __enter__(self) -> Any:
        self._num_asked = Counter[Any]()  # anew for each backward
        self._set_back: Callable[[], None] | None = None
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = self._next_call(func, args)
        if call is None:
            self._counts.recomputed_ops += func not in SAC_IGNORED_OPS
            return func(*args, **(kwargs or {}))
        outputs = tree_map_only(Packed, _unpack, call.outputs)
        if call.set_generators is not None:
            self._set_back = self._set_back or _random_state_behind(outputs)
            call.set_generators()
        return outputs

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._set_back is not None:  # a checkpoint that preserves no random state has set none
            self._set_back()

    def _next_call(self, op: Any, args: Any) -> KeptCall | None:
        calls, number = self._calls.get(op), self._num_asked[op]
        if calls is None:
            return None
        if number == len(calls):
            raise RuntimeError(
                f"a checkpoint calls {op} more often in the recomputation than in the forward, "
                f"where it was called {len(calls)} times; expected the same calls"
            )
        self._num_asked[op] += 1
        return calls[number]


def _random_state_behind(outputs: Any) -> Callable[[], None]:
    """Return a function that sets the generators to their state after the operator."""
    first = next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
    device_type = first.device.type
    host_state = torch.get_rng_state()
    indices, states = get_device_states(first)  # no indices for the host

    def set_generators() -> None:
        torch.set_rng_state(host_state)
        if indices:
            set_device_states(indices, states, device_type=device_type)

    return set_generators


def _unpack(packed: Packed) -> Tensor:
    """Unpack a tensor that autograd has not seen: it will become an operator's output."""
    with torch.no_grad():
        tensor = packed.unpack()
    with same_version_counter():
        return tensor.detach()


def same_version_counter() -> Any:
    """Return a context in which aliases share their tensor's version counter below autograd."""
    return SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False)


def storages_of(values: Any) -> list[UntypedStorage]:
    """Return the storages of the tensors among values, and of the tensors inside a subclass."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    plain = [part for tensor in tensors for part in plain_tensors(tensor)]
    return [tensor.untyped_storage() for tensor in plain if has_storage(tensor)]


def written_arguments(op: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that ``op`` writes into."""
    schema = getattr(op, "_schema", None)  # a higher-order operator has none
    if schema is None or not schema.is_mutable:
        return []
    operands = operator(op).operands(args, kwargs)
    return [value for value, kind in operands if kind == "write" and value is not None]
