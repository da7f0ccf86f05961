"""Saved tensors that are computed again from others that are saved, in place of being copied.

    saves x, copied          gelu          fc2          saves gelu(x), which a recipe gives
    x ----------------------> | -----> y ----> |
                                       y = gelu(x), computed again where backward asks for it

An operator that is cheap beside a copy of its output may run again: see ``operators.py``. In a pack
hook ``tensor.grad_fn`` is the node that made the tensor, and the node tells what our pack hook
returned for its inputs. A recipe holds those as autograd holds saved tensors: a :class:`Saved` of
its own for each, so they are copied once, are there when they are needed, and are counted.

NOTE [ Never another bit ]
    When a recipe is met for the first time at its place in the model, it is tried while the tensor
    is still there, and compared bit for bit. One that gave other bits is not tried again. The same
    is one of the same operators, dtypes, strides and flags: with other sizes or numbers, what ran
    in the forward runs again, too. What a node does not tell, the ``eps`` of a norm, is tried, and
    belongs to the weight of that norm. A tensor that was ever changed in place has no recipe.

NOTE [ Parameters ]
    FSDP empties the storage of a parameter when a forward is over, and fills it for a backward that
    may come behind the one which needs the recipe; an optimizer may run in between. So a recipe has
    a copy of a parameter, made once in a step.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from pp_offload._common.torch_private import (
    NODES,
    SHOWS_PACKED,
    disable_current_modes,
    sequence_number,
)
from pp_offload._core.operators import (
    EPS,
    OPERATORS,
    UNKNOWN,
    Call,
    Guess,
    Made,
    Number,
    call_of,
    operator_of,
)
from pp_offload._core.payloads import ByStorage
from pp_offload._core.saved import Resident, Saved
from pp_offload._core.tensors import Geometry, StorageSet, flat_bytes, storage_bytes
from pp_offload._core.verify import check_same, checksum_of

logger = logging.getLogger(__name__)

MOST_CALLS = 12
"""In one recipe. Each reads and writes about as much as the tensor has, and device memory is some
fifty times as fast as the link.
"""

MOST_LARGER = 4
"""How many times as large as the tensor an input may be."""

MOST_COPIED = 2**22
"""Bytes of a parameter that recipes may copy in each step."""

CHEAP = frozenset([*OPERATORS, Made])
"""Types of what may have a recipe."""

_TORCH_NODES = frozenset(NODES.values())


def maker_of(tensor: Tensor) -> Any:
    """The node that made a tensor, and which of its outputs it is; None if nobody may run it again.

    To be called where an operator saves the tensor. If that is the one that made it, its node must
    not be held by what it saves: a :class:`Made` is held in its place.
    """
    if tensor._version:
        return None  # the node tells nothing of what it was before
    node = tensor.grad_fn
    kind = type(node)
    if kind not in _TORCH_NODES:
        return None
    if node._sequence_nr() + 1 == sequence_number():  # type: ignore[union-attr]
        return (Made(node, tensor), 0) if kind in OPERATORS else None
    return node, tensor.output_nr


class Recipe:
    """Computes what a storage had, for all saved tensors that are views of it.

    Args:
        term: How.
        mover: The Mover that brings what it needs.
        uses: How many saved tensors it is computed for.
        label: Name of the group, for messages.
        checksum: Of the storage, with ``verify``.
    """

    __slots__ = ("_checksum", "_label", "_left", "_mover", "_uses", "given", "term")

    def __init__(
        self, term: Call, mover: Any, uses: int, label: str, checksum: int | None = None
    ) -> None:
        self.term, self._mover, self._label, self._checksum = term, mover, label, checksum
        self._uses = self._left = uses
        self.given: tuple[Any, int, Any] | None = None
        """What it gave last, weakly behind the last use; its version then; and for which stream."""

    def give(self) -> Tensor:
        """The tensor, for the live compute stream. Computed once for all its uses, unless that
        stream changes. Two threads may both compute it: that costs time.
        """
        live, given = self._mover.current_stream(), self.given
        tensor: Any = None
        if given is not None and given[2] == live:
            tensor = given[0]
            if type(tensor) is weakref.ref:
                tensor = tensor()
                if tensor is not None:
                    tensor._fix_weakref()  # torch may hold it without Python
            if tensor is not None and tensor._version != given[1]:
                tensor = None  # a backward that got it has changed it in place
        if tensor is None:
            tensor = _run(self.term, _unpacked, self._mover.backend.device.type)
            self._left = self._uses
            if self._checksum is not None:
                came = f"a tensor of group '{self._label}' was computed again"
                check_same(_whole(tensor), self._checksum, came)
        self._left -= 1
        held: Any = tensor if self._left > 0 else weakref.ref(tensor)
        self.given = held, tensor._version, live
        return tensor


class Chosen(NamedTuple):
    """What a group does not copy.

    Attributes:
        recipes: In its place, the saved tensors of each, and the storage that they are views of.
        reached: Inputs that left with other groups.
        settle: To be called when the group is about to leave: see NOTE [ Parameters ].
    """

    recipes: list[tuple[Recipe, list[Saved], UntypedStorage]]
    reached: list[Saved]
    settle: Callable[[], None]


class Recipes:
    """Finds recipes.

    Args:
        mover: Of the engine.
        kept: Storages of parameters and of what else never moves.

    Attributes:
        copies: Of parameters, in this step.
        may_reach: Whether recipes may need what earlier groups saved. Not where some of it may be
            on a disk, from which it would come back too late.
    """

    def __init__(self, mover: Any, kept: StorageSet) -> None:
        self._mover, self._kept = mover, kept
        self.may_reach = mover.tier.disk is None
        self._proofs: dict[Any, Any] = {}
        self._of_weights: Any = WeakIdKeyDictionary()
        self.copies: dict[Any, tuple[weakref.ref[UntypedStorage], Resident]] = {}

    @classmethod
    def if_shown(cls, mover: Any, kept: StorageSet) -> Recipes | None:
        """None, with one warning, for a torch whose nodes do not tell what they saved."""
        if SHOWS_PACKED:
            return cls(mover, kept)
        if not _warned:
            _warned.append(torch.__version__)
            logger.warning(
                "rematerialize is 'cheap', but the nodes of torch %s do not tell what a hook "
                "returned for what they saved, so all is copied; expected torch 2.13 or later",
                torch.__version__,
            )
        return None

    def go_on_as(self, old: Recipes) -> None:
        """What was proved stays so in another epoch."""
        self._proofs, self._of_weights = old._proofs, old._of_weights
        self.may_reach &= old.may_reach

    def forget_copies(self) -> None:
        """Another step begins, and parameters may be others."""
        self.copies.clear()

    def choose(self, group: Any, saved: ByStorage) -> Chosen | None:
        """Take out of what a group saved all that recipes give; the inputs of these join it."""
        mover = self._mover
        for _, (first, *_) in saved.values():
            if first.maker and type(first.maker[0]) in CHEAP:
                break
        else:
            return None
        if mover.backend.is_capturing or group.streams != [mover.current_stream()]:
            return None  # a recipe is tried on the live stream
        search = _Search(self, group, saved)
        recipes = search.recipes()
        return Chosen(recipes, search.reached, partial(self._settle, recipes))

    def _settle(self, recipes: list[tuple[Recipe, list[Saved], UntypedStorage]]) -> None:
        for recipe, *_ in recipes:
            recipe.term = self._settled(recipe.term)

    def _settled(self, term: Any) -> Any:
        if type(term) is Call:
            return term._replace(args=tuple(map(self._settled, term.args)))
        return self._lasting(term) if type(term) is Resident else term

    def proved(self, term: Any, members: list[Saved], place: Any) -> Any:
        """The term, if it gives the same bits; see NOTE [ Never another bit ]."""
        if term is UNKNOWN:
            return UNKNOWN
        guesses: list[Guess] = []
        kind = _kind(term, guesses), place, torch.are_deterministic_algorithms_enabled()
        proofs = self._proofs
        for guess in guesses:
            weight = guess.weight
            if type(weight) is not Resident or not isinstance(weight.tensor, Parameter):
                return UNKNOWN
            proofs = self._of_weights.setdefault(weight.tensor, {})
        if kind not in proofs:
            eps = self._try(term, members, EPS if guesses else (None,))
            if eps is UNKNOWN:
                return UNKNOWN  # for now
            proofs[kind] = eps
        if proofs[kind] is _REFUSED:
            return UNKNOWN
        return _with_eps(term, proofs[kind]) if guesses else term

    def _try(self, term: Call, members: list[Saved], guesses: tuple[float | None, ...]) -> Any:
        first = on_device(members[0])
        for eps in guesses:
            try:
                with disable_current_modes() if first.is_meta else nullcontext():
                    output = _run(_with_eps(term, eps), self._now, first.device.type)
            except torch.OutOfMemoryError:
                return UNKNOWN
            except RuntimeError:  # it wants other inputs
                continue
            is_alike = output.dtype == first.dtype and not output.storage_offset()
            # A virtual device has no data to compare. It trusts the operators, in no time.
            if is_alike and (first.is_meta or torch.equal(_whole(output), _whole(first))):
                return eps
        return _REFUSED

    def _now(self, leaf: Saved | Resident | Narrow) -> Tensor:
        """What a saved tensor is, while forward goes on."""
        if isinstance(leaf, Narrow):
            return leaf.view.contiguous().view(leaf.dtype)
        if leaf.tensor is not None:
            return leaf.tensor
        assert type(leaf) is Saved
        batch, mover = leaf.batch, self._mover
        if mover.backend.device.type == "meta":
            shape, dtype = batch.specs[leaf.index]
            payload = torch.empty(shape, dtype=dtype, device="meta")
        else:
            payload = mover.seen(batch, leaf.index)
        restore = leaf.unobserved
        return payload if restore is None else restore(payload)

    def _lasting(self, resident: Resident) -> Resident:
        """It, or a copy of a parameter; see NOTE [ Parameters ]."""
        tensor = resident.tensor
        storage = tensor.untyped_storage()
        if not self._kept.has(storage):
            return resident
        key = storage._cdata, Geometry.of(tensor), tensor._version
        of, copy = self.copies.get(key, (None, resident))
        if of is None or of() is not storage:  # the address may be another one's by now
            with torch.no_grad():
                copy = Resident(tensor.detach().clone())
            self.copies[key] = weakref.ref(storage), copy
        return copy


_REFUSED = object()
_warned: list[str] = []


class Narrow(NamedTuple):
    """In a term: what a saved tensor was made of, taken out of that tensor; it joins the group.

    Attributes:
        view: A part of the saved tensor, which has all of its bits that matter.
        dtype: What these are.
    """

    view: Tensor
    dtype: torch.dtype


class _Search:
    """For the recipes of one group.

    Args:
        owner: Proves them.
        group: The group.
        saved: What it saved.
    """

    def __init__(self, owner: Recipes, group: Any, saved: ByStorage) -> None:
        self._owner, self._group, self._saved = owner, group, saved
        makers = [(m.maker, m) for _, members in saved.values() for m in members if m.maker]
        self._by_maker: dict[Any, Saved] = dict(makers)
        self._storage: UntypedStorage | None = None
        self._num_calls = self._most_bytes = 0
        self._inputs: dict[int, list[int]] = {}
        self._stays: ByStorage = {}
        self.reached: list[Saved] = []

    def recipes(self) -> list[tuple[Recipe, list[Saved], UntypedStorage]]:
        """All that there are."""
        terms: list[tuple[Call, list[Saved], UntypedStorage]] = []
        stays = self._stays
        for key, (storage, members) in self._saved.items():
            maker = members[0].maker
            if maker is None or type(maker[0]) not in CHEAP:
                stays[key] = storage, members
                continue
            try:
                term = self._term(maker, storage, members)
            except (RuntimeError, AttributeError):
                # A backward has used up a node, or another torch names what it saves otherwise.
                term = UNKNOWN
            if term is UNKNOWN:
                stays[key] = storage, members
                continue
            self._inputs[key] = []
            terms.append((self._joined(term, key), members, storage))
            self._move_up(key)
        self._saved.clear()
        self._saved.update(stays)
        return [(self._recipe(term, each), each, storage) for term, each, storage in terms]

    def _recipe(self, term: Call, members: list[Saved]) -> Recipe:
        mover = self._owner._mover
        checksum = None
        if mover.verifier is not None:
            checksum = checksum_of(_whole(on_device(members[0])))
        return Recipe(term, mover, len(members), self._group.name, checksum)

    def _term(self, root: Any, storage: UntypedStorage, members: list[Saved]) -> Any:
        """How to compute a storage, where ``root`` made the first of its saved tensors."""
        while (operator := operator_of(root[0])) is not None and operator.is_view:
            root = root[0].next_functions[0]
        if operator is None or root[1] != 0:
            return UNKNOWN
        self._storage, self._num_calls = storage, 0
        self._most_bytes = MOST_LARGER * storage.nbytes()
        first = on_device(members[0])
        if any([on_device(member).dtype != first.dtype for member in members]):
            return UNKNOWN
        place = self._group.name, self._group.key and self._group.key.position, len(self._inputs)
        term, is_flat = self._owner.proved(self._call(*root), members, place), False
        if term is UNKNOWN:
            term, is_flat = self._owner.proved(_narrowed(root[0], first), members, place), True
        if term is UNKNOWN:
            return UNKNOWN
        for member in members:
            if is_flat or member.maker != root:
                member.restore = Geometry.of(on_device(member)).on_storage_of
        return term

    def _call(self, node: Any, index: int) -> Any:
        self._num_calls += 1
        if self._num_calls > MOST_CALLS:
            return UNKNOWN
        return call_of(node, index, self._input)

    def _input(self, node: Any, name: str, edge: Any) -> Any:
        """The term of an input of a node."""
        if name:
            packed = getattr(node, f"_raw_saved_{name.rstrip('?')}").data
            if packed is not None:
                return self._leaf(packed)
            if name.endswith("?") and edge[0] is None:
                return None
        if edge[0] is None:
            return UNKNOWN  # a tensor without gradient, which nobody saved
        saved = self._by_maker.get(edge)
        if saved is None and (result := getattr(edge[0], "_raw_saved_result", None)) is not None:
            saved = result.data  # of an operator that saves what it gives
        return self._call(*edge) if saved is None else self._leaf(saved)

    def _leaf(self, packed: Any) -> Any:
        """What an operator has saved, as a part of a term."""
        if type(packed) is Tensor and packed.dim() == 0 and packed.device.type == "cpu":
            with disable_current_modes():  # which are given a number in its place
                return Number(packed.item())
        if type(packed) is Resident:
            tensor = packed.tensor
            is_like_it = tensor._version == packed.version and type(tensor) in (Tensor, Parameter)
            if not is_like_it or tensor.device != self._owner._mover.backend.device:
                return UNKNOWN
            if self._owner._kept.has(tensor.untyped_storage()):
                # A copy of what has gaps has other strides, for which a kernel may round otherwise.
                if tensor.nbytes > MOST_COPIED or not tensor.is_contiguous():
                    return UNKNOWN
            return packed
        if type(packed) is not Saved or packed.wrapper is not None:
            return UNKNOWN
        if packed.group is not self._group:
            return self._earlier(packed)
        if packed.tensor is None or packed.tensor._version != packed.version:
            return UNKNOWN
        is_itself = packed.tensor.untyped_storage() is self._storage
        if is_itself or packed.tensor.nbytes > self._most_bytes:
            return UNKNOWN
        return packed

    def _earlier(self, saved: Saved) -> Any:
        """What an earlier group has saved, whose backward comes later than this one's."""
        other = saved.group
        is_closed = other.engine is self._group.engine and other.state is not other.state.OPEN
        if not is_closed or not self._owner.may_reach:
            return UNKNOWN
        if saved.recipe is not None:
            term = self._again(saved.recipe.term)
            if term is UNKNOWN:
                return UNKNOWN
            term = term._replace(saved=weakref.ref(saved))
            return term if saved.restore is None else Call(saved.restore, (term,))
        if saved.tensor is not None:
            if saved.tensor._version != saved.version:
                return UNKNOWN
            nbytes = saved.tensor.nbytes
        else:
            batch = saved.batch
            if batch.mover is not self._owner._mover or saved.index in batch.changed:
                return UNKNOWN
            nbytes = batch.sizes[saved.index]
        if nbytes > self._most_bytes:
            return UNKNOWN
        return saved

    def _again(self, term: Any) -> Any:
        """A recipe of an earlier group, for this one."""
        if type(term) is Call:
            self._num_calls += 1
            if self._num_calls > MOST_CALLS:
                return UNKNOWN
            args = tuple(map(self._again, term.args))
            if any([arg is UNKNOWN for arg in args]):
                return UNKNOWN
            return Call(term.function, args, term.saved)
        return self._earlier(term) if type(term) is Saved else term

    def _joined(self, term: Any, key: int) -> Any:
        """The term with saved tensors of its own, which join those of the group."""
        if type(term) is Call:
            args = tuple([self._joined(arg, key) for arg in term.args])
            return Call(term.function, args, term.saved)
        if type(term) is Narrow:
            source = Saved(term.view, self._group)
            source.restore = methodcaller("view", term.dtype)
            self._stays[-key] = term.view.untyped_storage(), [source]
            return source
        if type(term) is not Saved:
            return term
        twin = term.twin(self._group)
        if term.tensor is None:
            twin.batch, twin.index = term.batch, term.index
            self.reached.append(twin)
        elif term.group is self._group:
            other = term.tensor.untyped_storage()._cdata
            self._inputs[key].append(other)
            self._saved[other][1].append(twin)
        return twin

    def _move_up(self, key: int) -> None:
        """What a recipe needs is needed as early as what it gives."""
        for other in self._inputs[key]:
            for each in (other, -other):
                if each in self._stays:
                    self._stays[each] = self._stays.pop(each)
            if other in self._inputs:
                self._move_up(other)


def _narrowed(node: Any, tensor: Tensor) -> Any:
    """What a copy that repeats numbers or zeros was made of, where that was not saved."""
    flat = storage_bytes(tensor)
    if flat is None or node is None or not node.next_functions[0][0]:
        return UNKNOWN
    before, index = node.next_functions[0]
    kind, kind_before = type(node), type(before)
    if kind is _CAST and tensor.dtype is torch.float32:
        if before._input_metadata[index].dtype is torch.bfloat16:
            upper = flat.view(torch.int16)[1::2]  # the lower half of each number is zeros
            return Call(Tensor.to, (Narrow(upper, torch.bfloat16), torch.float32))
    if kind is _CLONE and kind_before is _EXPAND:
        shape = torch.Size(before._input_metadata[index].shape)
        size = before._saved_self_sym_sizes
        size = (1,) * (len(shape) - len(size)) + size
        part = [slice(n if n < m else None) for n, m in zip(size, shape, strict=True)]
        small = Narrow(flat.view(tensor.dtype).view(shape)[tuple(part)], tensor.dtype)
        expanded = Call(torch.broadcast_to, (small, shape))
        return Call(OPERATORS[_CLONE].function, (expanded,))
    return UNKNOWN


_CAST, _CLONE, _EXPAND = (NODES[f"{name}Backward0"] for name in ("ToCopy", "Clone", "Expand"))


def computed(term: Any, value_of: Callable[[Any], Tensor]) -> Any:
    """The tensor that a term stands for."""
    if type(term) is Call:
        return term.function(*[computed(arg, value_of) for arg in term.args])
    if type(term) in (Saved, Resident, Narrow):
        return value_of(term)
    return term.value if type(term) is Number else term


def on_device(saved: Saved) -> Tensor:
    """The tensor of what has not left."""
    assert saved.tensor is not None
    return saved.tensor


def _unpacked(leaf: Saved | Resident) -> Tensor:
    return leaf.unpack()


def _run(term: Call, value_of: Callable[[Any], Tensor], device: str) -> Tensor:
    """What the term gives as the operators ran, whatever is on around a backward."""
    if device != "meta" and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False), torch.no_grad():
            return computed(term, value_of)  # type: ignore[no-any-return]
    with torch.no_grad():
        return computed(term, value_of)  # type: ignore[no-any-return]


def _whole(tensor: Tensor) -> Tensor:
    """The bytes of its storage."""
    whole = storage_bytes(tensor)
    return flat_bytes(tensor) if whole is None else whole


def _with_eps(term: Any, eps: float | None) -> Any:
    if type(term) is Guess:
        return eps
    if type(term) is not Call:
        return term
    return Call(term.function, tuple([_with_eps(arg, eps) for arg in term.args]), term.saved)


def _kind(term: Any, guesses: list[Guess]) -> Any:
    """What the bits of a result may depend on, besides those of the inputs and their sizes."""
    if type(term) is Call:
        return term.function, *[_kind(arg, guesses) for arg in term.args]
    if type(term) is Narrow:
        return Narrow, term.dtype, term.view.dim()
    if type(term) in (Saved, Resident):
        tensor = term.tensor
        if tensor is None:
            restore = term.unobserved  # bound to a geometry, or to nothing that differs
            return term.batch.specs[term.index][1], getattr(restore, "__self__", type(restore))
        if tensor.is_contiguous():
            return tensor.dtype, tensor.dim()
        return tensor.dtype, tensor.shape, tensor.stride()
    if type(term) is Guess:
        guesses.append(term)
        return Guess
    if type(term) is Number:
        return type(term.value)
    return len(term) if type(term) is torch.Size else term
