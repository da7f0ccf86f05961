"""Recipes: compute saved tensors again from other saved tensors, instead of copying them.

    saves x, copied          gelu          fc2          saves gelu(x), which a recipe gives
    x ----------------------> | -----> y ----> |
                                       y = gelu(x), computed again where backward asks for it

An operator that is cheap beside a copy of its output may run again: see ``cheap_operators.py``.
In a pack hook ``tensor.grad_fn`` is the node that made the tensor, and the node has what our pack
hook returned for its inputs. A recipe holds its inputs as autograd holds saved tensors, by a
:class:`Saved` of its own for each: they are copied once, reloaded when needed, and counted.

NOTE [ Never another bit ]
    A recipe is tried at its first use at a place in the model, while the tensor is still there,
    and compared bit for bit. A recipe that gave other bits is not tried again. Recipes with
    the same operators, dtypes, strides and flags are alike: with other sizes or numbers, the same
    kernels run as in the forward. A tensor that was ever changed in place has no recipe.

    A program may change a tensor in place where autograd does not see it, such as in ``no_grad``.
    Saved tensors count such changes. If a tensor on the way was not saved, a sum of the result's
    words is compared at each use. In dispatch modes of others operators may give other results: no
    recipe is chosen in them, and none runs in them, unless the mode says that it ``only_observes``.

    A tensor of zeros proves nothing. One of equal numbers proves little, so the output must also
    lie in memory as the tensor does. The ``eps`` of a norm, which a node does not save, is tried,
    and belongs to the weight of that norm; it is proved once a sixteenth less and a sixteenth more
    would have given other bits.

NOTE [ Parameters ]
    FSDP empties the storage of a parameter when a forward is over, and fills it for a backward
    that may come after the one that needs the recipe; an optimizer may run in between. So the
    recipes of a group have a copy of a parameter. No other group shares it: a fused optimizer,
    which counts no change, may have run before that one's forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from pp_offload._common.torch_private import disable_current_modes, has_modes_of_others
from pp_offload._core.cheap_operators import (
    CHEAP,
    EPS,
    UNKNOWN,
    Call,
    Eps,
    Guess,
    Number,
    require,
    viewed,
)
from pp_offload._core.eligibility import Eligibility
from pp_offload._core.geometry import Geometry, flat_bytes, storage_bytes
from pp_offload._core.payloads import ByStorage
from pp_offload._core.saved import Resident, Saved, modified
from pp_offload._core.search import Narrow, Search, Walk
from pp_offload._core.verify import check_same, checksum_of
from pp_offload.errors import OffloadError

MOST_TRIALS = 30  # of tensors that prove nothing, such as zeros; then each thirtieth is tried
ROWS = 1024  # parts of a storage that are added up; words beyond a multiple of it are compared


class Recipe:
    """Computes the bytes of a storage, for all saved tensors that are views of it."""

    __slots__ = "_label _mover _threads _uses _uses_left checksum copies given sums term".split()

    def __init__(self, term: Call, mover: Any, uses: int, label: str) -> None:
        self.term, self._mover, self._label = term, mover, label
        self.checksum: int | None = None
        self.sums: Sums | None = None
        self.copies: Any = None  # of parameters for its group, which die together, as planned
        self._threads = torch.get_num_threads()  # each thread has a number of its own
        self._uses = self._uses_left = uses
        # Last tensor (weak reference after the last use), its version then, and its stream.
        self.given: tuple[Any, int, Any] | None = None

    def give(self) -> Tensor:
        """Return the tensor for the current compute stream. It is computed once for all uses, and
        again if that stream changes. Two threads may compute it twice: that only costs time.
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
                tensor = None  # a backward has changed it in place
        if tensor is None:
            device = self._mover.backend.device.type
            tensor = _run(self.term, _unpacked, device, self._threads)
            self._uses_left = self._uses
            if self.sums is not None:
                self.sums.check(tensor, self._label)
            if self.checksum is not None:
                came = f"a tensor of group '{self._label}' was computed again"
                check_same(_whole(tensor), self.checksum, came)
        self._uses_left -= 1
        held: Any = tensor if self._uses_left > 0 else weakref.ref(tensor)
        self.given = held, tensor._version, live
        return tensor


class Sums(NamedTuple):
    """Sums of the words of a tensor, whose recipe passes tensors that were not saved. On a meta
    device there are none, so that the time of reading the tensor twice is not counted there.
    """

    sums: Tensor
    forget: Callable[[], None]  # refuses such recipes from now on

    @classmethod
    def of(cls, tensor: Tensor, forget: Callable[[], None]) -> Sums:
        """Add up the words of a storage by rows and by columns, so that a moved word counts, too.
        Words of half an integer: two changes of a sign cannot cancel.
        """
        flat = _whole(tensor)
        words = flat if flat.numel() % 4 else flat.view(torch.int32)
        whole = words.numel() - words.numel() % ROWS
        rows, rest = words[:whole].view(ROWS, -1), words[whole:].to(torch.int64)
        return cls(torch.cat([rows.sum(0), rows.sum(1), rest]), forget)

    def check(self, computed: Tensor, label: str) -> None:
        """Compare the tensor of group ``label``, computed again. Raises as :func:`require`."""
        is_same = (Sums.of(computed, self.forget).sums == self.sums).all()
        shape = tuple(computed.shape)
        require(is_same, f"a tensor of group '{label}', of shape {shape}, {CHANGED}", self.forget)


CHANGED = (
    "cannot be computed again: since an earlier step, something that it was made of was changed in "
    "place where autograd does not see it, as within no_grad or by detach(); use an operation that "
    "is not in place there, or OffloadConfig(rematerialize='none')"
)

RAN_IN_PLACE = (
    "a tensor cannot be computed again: since an earlier step, an operator behind it runs in "
    "place, with a result of another dtype; use the operator that is not in place, or "
    "OffloadConfig(rematerialize='none')"
)


class Chosen(NamedTuple):
    """What a group computes again, and does not copy."""

    recipes: list[tuple[Recipe, list[Saved], UntypedStorage]]  # with the storage that it gives
    reached: list[Saved]  # inputs that left with other groups
    copy_parameters: Callable[[], None]  # before the group leaves: see NOTE [ Parameters ]
    copies: dict[Any, Resident]  # those that it makes


class Recipes:
    """Finds recipes."""

    def __init__(self, mover: Any, eligibility: Eligibility) -> None:
        self.mover, self.eligibility = mover, eligibility
        self.is_planned = True  # whether a plan may choose which groups stay
        # Whether recipes no longer pass tensors whose version nobody compares: one was changed.
        self.refuses_gaps = False
        # By kind: the eps of a norm, None without one, _REFUSED, or how many proved nothing.
        self._proofs: dict[Any, Any] = {}
        self._of_weights: Any = WeakIdKeyDictionary()

    def go_on_as(self, old: Recipes) -> None:
        """Take over the proofs of an earlier epoch."""
        self._proofs, self._of_weights = old._proofs, old._of_weights
        self.is_planned, self.refuses_gaps = old.is_planned, old.refuses_gaps

    def _refuse_gaps(self) -> None:
        self.refuses_gaps = True

    def choose(self, group: Any, saved: ByStorage) -> Chosen | None:
        """Remove what recipes give from ``saved``, and add the recipes' inputs to it."""
        mover = self.mover
        makers = [members[0].maker for _, members in saved.values()]
        if not any([type(maker[0]) in CHEAP for maker in makers if maker]):
            return None
        if mover.backend.is_capturing or group.streams != [mover.current_stream()]:
            return None  # a recipe is tried on the live stream
        if has_modes_of_others():
            return None  # a recipe would run without them
        search = Search(self, group, saved)
        recipes: list[tuple[Recipe, list[Saved], UntypedStorage]] = []
        for term, members, storage, has_gap in search.take_out():
            tensor, recipe = members[0].here, Recipe(term, mover, len(members), group.name)
            if mover.verifier is not None:
                recipe.checksum = checksum_of(_whole(tensor))
            if has_gap and not tensor.is_meta:
                recipe.sums = Sums.of(tensor, self._refuse_gaps)
            recipes.append((recipe, members, storage))
        copies: dict[Any, Resident] = {}
        copied = partial(self._copied, copies)

        def copy_parameters() -> None:
            for recipe, *_ in recipes:
                recipe.term, recipe.copies = recipe.term.with_leaves(copied), copies

        return Chosen(recipes, search.reached, copy_parameters, copies)

    def proved(self, term: Any, walk: Walk, members: list[Saved], place: list[Any]) -> Any:
        """Return the term if it gives the same bits, else UNKNOWN: NOTE [ Never another bit ]."""
        if term is UNKNOWN or (walk.has_gap and self.refuses_gaps):
            return UNKNOWN
        guesses, is_deterministic = walk.guesses, torch.are_deterministic_algorithms_enabled()
        kind = *walk.kind, *place, is_deterministic
        proofs = self._proofs
        for guess in guesses:
            weight = guess.weight
            if type(weight) is not Resident or not isinstance(weight.tensor, Parameter):
                return UNKNOWN
            # By storage: torch exchanges no parameter that has a weak reference.
            proofs = self._of_weights.setdefault(weight.tensor.untyped_storage(), {})
            kind = weight.tensor.storage_offset(), *kind
        proof = proofs.get(kind, 0)
        if type(proof) is int:
            is_due = proof < MOST_TRIALS or proof % MOST_TRIALS == 0
            eps = self._try(term, members[0], walk) if is_due else UNKNOWN
            proof = proofs[kind] = proof + 1 if eps is UNKNOWN else eps
        if proof is _REFUSED or type(proof) is int:
            return UNKNOWN
        return _with_eps(term, Eps(proof, proofs.clear)) if guesses else term

    def _try(self, term: Call, member: Saved, walk: Walk) -> Any:
        """Return the eps (None without one), _REFUSED, or UNKNOWN if the tensor proves none."""
        tensor = member.here
        with disable_current_modes() if tensor.is_meta else nullcontext():
            try:
                if not walk.guesses:
                    is_equal = self._gives(term, tensor, walk)
                    proves = tensor.is_meta or bool(tensor.any())
                    return _REFUSED if not is_equal else None if proves else UNKNOWN
                for eps in EPS:
                    if not self._gives(_with_eps(term, Eps(eps)), tensor, walk):
                        continue
                    if tensor.is_meta:
                        return eps
                    size = torch.finfo(tensor.dtype).eps if eps is None else eps
                    nears = [_with_eps(term, Eps(size * part)) for part in (15 / 16, 17 / 16)]
                    is_near = any([self._gives(near, tensor, walk) for near in nears])
                    return UNKNOWN if is_near else eps
            except torch.OutOfMemoryError:
                return UNKNOWN
        return _REFUSED

    def _gives(self, term: Call, tensor: Tensor, walk: Walk) -> bool:
        """Whether the term computes the storage of the tensor, in the same layout."""
        try:
            output = _run(term, self._value_in_forward, tensor.device.type, 0)
            if output.dtype != tensor.dtype or output.storage_offset():
                return False
            if walk.views is not None:
                seen = viewed(output, walk.views)
                is_view = seen.untyped_storage()._cdata == output.untyped_storage()._cdata
                if not is_view or Geometry.of(seen) != Geometry.of(tensor):
                    return False
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ZeroDivisionError):  # it refuses these inputs
            return False
        # A meta device has no data to compare: the operators are trusted, in no time.
        return tensor.is_meta or torch.equal(_whole(output), _whole(tensor))

    def _value_in_forward(self, leaf: Saved | Resident | Narrow) -> Tensor:
        """Return the value of a saved tensor while forward goes on."""
        if isinstance(leaf, Narrow):
            return leaf.view.contiguous().view(leaf.dtype)
        if leaf.tensor is not None:
            return leaf.tensor
        assert type(leaf) is Saved
        batch, mover = leaf.batch, self.mover
        if mover.backend.device.type == "meta":
            shape, dtype = batch.specs[leaf.index]
            payload = torch.empty(shape, dtype=dtype, device="meta")
        else:
            mover.synchronize()
            payload = batch.place.tensors[leaf.index].to(mover.backend.device, copy=True)
        return payload if leaf.restore is None else leaf.restore(payload)

    def _copied(self, copies: dict[Any, Resident], leaf: Any) -> Any:
        """Return a copy of a parameter, or ``leaf`` itself; see NOTE [ Parameters ]."""
        if type(leaf) is not Resident or leaf.tensor not in self.eligibility.residents:
            return leaf
        key = leaf.tensor.untyped_storage()._cdata, Geometry.of(leaf.tensor)
        if key not in copies:
            with torch.no_grad():
                copies[key] = Resident(leaf.tensor.detach().clone())
        return copies[key]


_REFUSED = object()


def _unpacked(leaf: Saved | Resident) -> Tensor:
    """Return an input of a recipe. Its owner may have emptied it, which counts no change."""
    tensor = leaf.unpack()
    if tensor.nbytes and not tensor.untyped_storage().nbytes():
        raise modified(tensor, leaf.version, leaf.group.name if type(leaf) is Saved else None)
    return tensor


def computed(term: Any, value_of: Callable[[Any], Tensor]) -> Any:
    if type(term) is Call:
        result = term.function(*[computed(arg, value_of) for arg in term.args])
        if term.dtype is not None and result.dtype is not term.dtype:
            raise OffloadError(RAN_IN_PLACE)
        return result
    if type(term) in (Saved, Resident, Narrow):
        return value_of(term)
    return term.value if type(term) is Number else term


def _run(term: Call, value_of: Callable[[Any], Tensor], device: str, threads: int) -> Tensor:
    """Return the term's value as in the forward, whatever modes are on around a backward."""
    with ExitStack() as modes:
        if device == "cpu" and threads not in (0, now := torch.get_num_threads()):
            modes.callback(torch.set_num_threads, now)
            torch.set_num_threads(threads)  # which decides what ends of rows are vectors
        modes.enter_context(torch.no_grad())
        if device != "meta":
            if has_modes_of_others():
                modes.enter_context(disable_current_modes())
            if torch.is_autocast_enabled(device):
                modes.enter_context(torch.autocast(device, enabled=False))
        return computed(term, value_of)  # type: ignore[no-any-return]


def _whole(tensor: Tensor) -> Tensor:
    whole = storage_bytes(tensor)
    return flat_bytes(tensor) if whole is None else whole


def _with_eps(term: Call, eps: Eps) -> Call:
    return term.with_leaves(lambda part: eps if type(part) is Guess else part)
