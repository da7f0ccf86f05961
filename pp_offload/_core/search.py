"""Finds recipes for what a group saved, by a walk from each saved tensor to others.

search = Search(recipes, group, by_storage(group.saved_refs))
search.take_out()  # removes what recipes give from the dictionary, and adds their inputs
"""

from __future__ import annotations

from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from pp_offload._common.torch_private import NODES, disable_current_modes
from pp_offload._core.cheap_operators import (
    CHEAP,
    OPERATORS,
    OPTIONAL,
    PARAMETER,
    UNKNOWN,
    Call,
    Guess,
    Number,
    attributes_of,
    behind,
    identity_of,
    kind_of,
    operator_of,
    output_of,
)
from pp_offload._core.eligibility import may_be_statistics
from pp_offload._core.geometry import Geometry, has_new_strides, order_of, storage_bytes
from pp_offload._core.payloads import ByStorage
from pp_offload._core.saved import Resident, Saved

MOST_CALLS = 12
"""Most calls in one recipe. Each reads and writes about as much as the tensor has, and device
memory is some fifty times as fast as the link.
"""

MOST_LARGER = 4  # an input may be this many times as large as the tensor
VECTOR_BYTES = 32  # the most that kernels read at once, from memory at a multiple of them
SHARE_COPIED = 1 / 4  # of a tensor's bytes: the most of a parameter that its recipe copies


class Narrow(NamedTuple):
    """A leaf of a term: the source of a saved tensor, taken out of it; it joins the group."""

    view: Tensor  # a part of the saved tensor, with all of its bits that matter
    dtype: torch.dtype  # of the source


class Computable(NamedTuple):
    """A storage that a recipe can compute again."""

    term: Call
    members: list[Saved]  # views of the storage
    storage: UntypedStorage
    has_gap: bool  # whether it passes a tensor whose version nobody compares


class Search:
    """Search for all recipes of one group."""

    def __init__(self, recipes: Any, group: Any, saved: ByStorage) -> None:
        self.recipes, self.group, self._saved = recipes, group, saved
        # Saved tensors of the group by output and identity of the node that made each.
        self.by_maker = {
            each.maker[1:]: each for _, members in saved.values() for each in members if each.maker
        }
        self.reached: list[Saved] = []  # inputs that left with other groups
        self.below: dict[int, int] = {}  # by storage, operators that run for it and its inputs
        self._above: dict[int, int] = {}  # by storage, most operators that run after it is needed
        self._users: dict[int, list[int]] = {}  # by storage, those whose recipes need it
        self._parts: ByStorage = {}  # what replaces storages that repeat numbers: see Narrow

    def take_out(self) -> list[Computable]:
        """Find recipes, take their storages out of the saved tensors, and add their inputs."""
        computable: list[Computable] = []
        order = {key: at for at, key in enumerate(self._saved)}
        for key, (storage, members) in self._saved.items():
            if members[0].maker is None or type(members[0].maker[0]) not in CHEAP:
                continue
            try:
                way = self._way(key, storage, members)
            except (RuntimeError, AttributeError):
                # A backward has freed what a node saved, or this torch names it otherwise.
                continue
            if way is not None:
                computable.append(way)
        if computable:
            stays = {key: each for key, each in self._saved.items() if key not in self.below}
            stays.update(self._parts)
            keys = sorted(stays, key=lambda key: self._needed_at(abs(key), order))
            self._saved.clear()
            self._saved.update((key, stays[key]) for key in keys)
        return computable

    def _way(self, key: int, storage: UntypedStorage, members: list[Saved]) -> Computable | None:
        """Return how to compute a storage, if that can be proved."""
        maker = members[0].maker
        root = maker[:2]
        views = []
        while (operator := operator_of(root[0])) is not None and operator.is_view:
            views.append(root)
            root = behind(root[0].next_functions[0])
        if operator is None or root[1] != 0 or not storage.nbytes():
            return None
        first = members[0].here
        if len(members) > 1 and any([each.here.dtype != first.dtype for each in members]):
            return None
        position = self.group.key and self.group.key.position
        kinds = [type(node) for node, _ in views]
        place = [self.group.name, position, len(self.below), _lies(first), *kinds]
        if views and type(root[0]) in (_CAST, _CLONE):  # the program chooses how their result lies
            for node, index in [*views, root]:
                place += map(kind_of, attributes_of(node, index))
                place += [size == 1 for size in node._input_metadata[index].shape]
        walk, is_flat = Walk(self, storage, views), False
        term = self.recipes.proved(walk.call(*root), walk, members, place)
        if term is UNKNOWN:
            walk, is_flat = Walk(self, storage, views), True
            term = self.recipes.proved(_narrowed(root[0], first, walk), walk, members, place)
        before = [self.below.get(input_key, 0) for input_key, _ in walk.inputs]
        calls = walk.num_calls + max(before, default=0)
        above = self._above.get(key, 0)
        if term is UNKNOWN or calls + above > MOST_CALLS:
            return None
        if is_flat:
            term = term.with_leaves(partial(self._with_part, key))
        for member in members:
            is_same = member.maker is not None and member.maker[1:] == maker[1:]
            if is_flat or views or not is_same or 1 in member.here.shape:
                member.restore = Geometry.of(member.here).on_storage_of
        self.below[key] = calls
        self.reached += walk.reached
        for input_key, saved in walk.inputs:
            self._saved[input_key][1].append(saved)
            self._users.setdefault(input_key, []).append(key)
            self._above[input_key] = max(self._above.get(input_key, 0), above + calls)
        return Computable(term, members, storage, walk.has_gap)

    def _needed_at(self, key: int, order: dict[int, int]) -> int:
        """Return the saving order of the last user: backward needs it first."""
        users = self._users.pop(key, ())  # taken out: the result is stored
        order[key] = max([order[key], *[self._needed_at(user, order) for user in users]])
        return order[key]

    def _with_part(self, key: int, part: Any) -> Any:
        """Return a saved tensor in place of a :class:`Narrow`."""
        if type(part) is not Narrow:
            return part
        source = Saved(part.view, self.group)
        source.restore = methodcaller("view", part.dtype)
        self._parts[-key] = part.view.untyped_storage(), [source]
        return source


class Walk:
    """A walk from a saved tensor along the graph to other saved tensors."""

    views: list[tuple[Any, int]] | None  # None where the recipe gives the storage flat

    def __init__(
        self, search: Search, storage: UntypedStorage, views: list[tuple[Any, int]]
    ) -> None:
        self._search, self._storage, self.views = search, storage, views
        self._most_bytes = MOST_LARGER * storage.nbytes()
        self.num_calls = 0  # operators that the recipe itself runs
        # All that bits may depend on, besides the bits and sizes of the inputs. Recipes with the
        # same kind run the same kernels, so a proof serves both.
        self.kind: list[Any] = []
        self.guesses: list[Guess] = []
        # Keys of storages, with a twin of each saved tensor of the group that is needed.
        self.inputs: list[tuple[int, Saved]] = []
        self.reached: list[Saved] = []  # twins of needed saved tensors that left with other groups
        self.has_gap = False  # whether a tensor on the way was not saved, which may have changed

    def call(self, node: Any, index: int) -> Any:
        """Return the term of a node's output; UNKNOWN without one, or if it has too many calls."""
        self.num_calls += 1
        operator = operator_of(node)
        if operator is None or self.num_calls > MOST_CALLS:
            return UNKNOWN
        edges, args = node.next_functions, []
        for at, name in enumerate(operator.inputs or ("",) * len(edges)):
            # A dropout has two inputs here and one edge: its mask is an output of its own.
            arg = self.input(node, name, edges[at] if at < len(edges) else (None, 0))
            if arg is UNKNOWN:
                return UNKNOWN
            args.append(arg)
        if "eps" in operator.attributes:
            self.guesses.append(Guess(args[1]))
            args.append(self.guesses[-1])
        values = attributes_of(node, index)
        self.kind += [*map(kind_of, values), operator.function, len(args)]
        dtype = output_of(node, index).dtype if len(edges) > 1 else None
        return Call(operator.function, (*args, *values), dtype)

    def input(self, node: Any, name: str, edge: Any) -> Any:
        """Return the term of an input that comes to a node by ``edge`` and is saved as ``name``."""
        edge = behind(edge)
        if name == PARAMETER:
            if type(edge[0]) is not _LEAF or not is_of_parameter(edge[0]):
                return UNKNOWN
            self._search.recipes.eligibility.residents.add(edge[0].variable)
            self.has_gap = True
            return self._resident(Resident(edge[0].variable))
        if name:
            saved_as = getattr(node, name)
            if type(saved_as) is tuple:  # of indices
                if len(saved_as) != 1:
                    return UNKNOWN
                (saved_as,) = saved_as
            packed = saved_as.data
            if type(packed) is Resident:
                is_frozen = edge[0] is None and isinstance(packed.tensor, Parameter)
                self.has_gap |= is_frozen  # it may hold statistics, so each use is compared
                if edge[0] is None and may_be_statistics(packed.tensor) and not is_frozen:
                    return UNKNOWN  # its kernels write it and count no change
                residents = self._search.recipes.eligibility.residents
                if is_frozen or is_of_parameter(edge[0]):
                    residents.add(packed.tensor)
                elif packed.tensor in residents:
                    return UNKNOWN  # a buffer, which its module may change through .data
            if packed is not None:
                return self._leaf(packed)
        if edge[0] is None:  # an unsaved tensor without gradient, or no tensor
            return None if name in OPTIONAL else UNKNOWN
        saved = self._search.by_maker.get((edge[1], identity_of(edge[0])))
        if saved is None and hasattr(edge[0], "_raw_saved_result"):
            saved = edge[0]._raw_saved_result.data  # the operator saves its output
        if saved is not None:
            # Once a tensor has left, no version tells of a change before this group has used it.
            group = getattr(saved, "group", None)
            self.has_gap |= type(saved) is not Resident and group is not self._search.group
            return self._leaf(saved)
        operator = operator_of(edge[0])
        if operator is not None and not operator.is_view:  # a view counts changes with its base
            self.has_gap = True
        return self.call(*edge)

    def _leaf(self, packed: Any) -> Any:
        kind = type(packed)
        if kind is not Saved:
            return self._constant(packed) if kind is Tensor else self._resident(packed)
        if packed.group is not self._search.group:
            return self._earlier(packed)
        tensor = packed.tensor
        if tensor is None or tensor._version != packed.version or packed.wrapper is not None:
            return UNKNOWN
        storage = tensor.untyped_storage()
        is_empty = not storage.nbytes()  # its owner emptied it
        if is_empty or storage is self._storage or tensor.nbytes > self._most_bytes:
            return UNKNOWN
        self._note(tensor)
        self.inputs.append((storage._cdata, packed.twin(packed.group)))
        return self.inputs[-1][1]

    def _constant(self, packed: Tensor) -> Any:
        if packed.dim() != 0 or packed.device.type != "cpu" or packed.requires_grad:
            return UNKNOWN
        if packed.dtype not in (torch.float64, torch.int64, torch.bool, torch.complex128):
            return UNKNOWN  # a tensor of the program; those are the dtypes of Python's numbers
        with disable_current_modes():  # which are given a number in its place
            number = Number(packed.item())
        self.kind.append(kind_of(number))
        return number

    def _resident(self, packed: Any) -> Any:
        if type(packed) is not Resident:
            return UNKNOWN
        tensor, recipes = packed.tensor, self._search.recipes
        is_like_it = tensor._version == packed.version and type(tensor) in (Tensor, Parameter)
        if not is_like_it or tensor.device != recipes.mover.backend.device:
            return UNKNOWN
        if not tensor.untyped_storage().nbytes():
            return UNKNOWN  # its owner emptied it, as FSDP does behind a module's forward
        if recipes.eligibility.residents.has(tensor.untyped_storage()):
            # Of a copy without gaps, or where vectors begin, a kernel may round otherwise.
            is_alike = tensor.is_contiguous() and tensor.data_ptr() % VECTOR_BYTES == 0
            if not is_alike or tensor.nbytes > SHARE_COPIED * self._storage.nbytes():
                return UNKNOWN
        self._note(tensor)
        return packed

    def _note(self, tensor: Tensor) -> None:
        """Add the properties of an input that kernels are chosen by to ``kind``."""
        self.kind += tensor.dtype, tensor.dim(), _lies(tensor)

    def _earlier(self, saved: Saved) -> Any:
        """Return the term of a tensor that an earlier group saved; its backward comes later.
        Without a plan, which would have to know of both groups for each choice, its recipe may be a
        part of this one. A tensor that stays is not used then: it may be changed in place, and
        backward come to this group only.
        """
        group, recipes = self._search.group, self._search.recipes
        earlier, tensor = saved.group, saved.tensor
        is_closed = earlier.engine is group.engine and earlier.state is not earlier.state.OPEN
        if not is_closed or saved.wrapper is not None:
            return UNKNOWN
        if saved.recipe is not None:
            return self._recipe_of(saved)
        if tensor is not None:
            is_like_it = tensor._version == saved.version
            if not is_like_it or tensor.nbytes > self._most_bytes or not recipes.is_planned:
                return UNKNOWN
            self._note(tensor)
            return saved.twin(group)
        batch = saved.batch
        is_large = batch.sizes[saved.index] > self._most_bytes
        if is_large or batch.mover is not recipes.mover or saved.index in batch.changed:
            return UNKNOWN
        if batch.passage is not None or batch.write is not None:
            return UNKNOWN  # it could come back too late from the disk
        self.kind += batch.specs[saved.index][1], kind_of(_geometry(saved))
        twin = saved.twin(group)
        twin.batch, twin.index = batch, saved.index
        self.reached.append(twin)
        return twin

    def _recipe_of(self, saved: Saved) -> Any:
        if self._search.recipes.is_planned or saved.tensor is not None:
            return UNKNOWN
        self.has_gap |= saved.recipe.sums is not None
        term = self._again(saved.recipe.term)
        if term is UNKNOWN or saved.restore is None:
            return term
        geometry = _geometry(saved)
        self.kind += kind_of(geometry), Geometry.on_storage_of
        return Call(Geometry.on_storage_of, (geometry, term))

    def _again(self, term: Any) -> Any:
        """Return a part of an earlier group's recipe as a part of this one."""
        kind = type(term)
        if kind is Saved:
            return self._earlier(term)
        if kind is not Call:
            if kind is Resident:
                self._note(term.tensor)
            else:
                self.kind.append(kind_of(term))
            return term
        self.num_calls += 1
        if self.num_calls > MOST_CALLS:
            return UNKNOWN
        args = tuple(map(self._again, term.args))
        if any([arg is UNKNOWN for arg in args]):
            return UNKNOWN
        self.kind += term.function, len(args)
        return term._replace(args=args)


def _lies(tensor: Tensor) -> Any:
    """Return how a tensor lies in memory, as far as kernels depend on it. With a dimension of 1 it
    may be contiguous in several ways, and a convolution chooses its kernel by the strides.
    """
    is_plain = tensor.is_contiguous() and (1 not in tensor.shape or has_new_strides(tensor))
    return is_plain or order_of(tensor.shape, tensor.stride())


def is_of_parameter(node: Any, *, may_be_cast: bool = False) -> bool:
    """Whether a tensor that this node made is a parameter, or a view of one, or of its cast."""
    while node is not None and type(node) is not _LEAF:
        operator = operator_of(node)
        is_cast = may_be_cast and type(node) is _CAST
        if operator is None or not (operator.is_view or is_cast):
            return False
        node = node.next_functions[0][0]
    return node is not None and isinstance(node.variable, Parameter)


def _geometry(saved: Saved) -> Any:
    """Return the layout of a tensor in its payload: ``restore`` is a method of a geometry,
    another call, or None for the payload itself.
    """
    restore = saved.restore
    return getattr(restore, "__self__", None) or getattr(restore, "args", type(restore))


def _narrowed(node: Any, tensor: Tensor, walk: Walk) -> Any:
    """Return a term for a copy that repeats numbers or zeros, whose source was not saved."""
    flat = storage_bytes(tensor)
    if flat is None or node is None or not node.next_functions[0][0]:
        return UNKNOWN
    before, index = behind(node.next_functions[0])
    kinds = type(node), type(before)
    walk.kind += kinds
    if kinds[0] is _CAST and tensor.dtype is torch.float32:
        if before._input_metadata[index].dtype is torch.bfloat16:
            upper = flat.view(torch.int16)[1::2]  # the lower half of each number is zeros
            walk.views = None
            return Call(Tensor.to, (Narrow(upper, torch.bfloat16), torch.float32))
    if kinds == (_CLONE, _EXPAND):
        shape = torch.Size(before._input_metadata[index].shape)
        size = before._saved_self_sym_sizes
        size = (1,) * (len(shape) - len(size)) + size
        part = [slice(n if n < m else None) for n, m in zip(size, shape, strict=True)]
        small = Narrow(flat.view(tensor.dtype).view(shape)[tuple(part)], tensor.dtype)
        expanded = Call(torch.broadcast_to, (small, shape))
        return Call(OPERATORS[_CLONE].function, (expanded,))
    return UNKNOWN


_LEAF: Any = NODES["AccumulateGrad"]
_CAST, _CLONE, _EXPAND = (NODES[f"{name}Backward0"] for name in ("ToCopy", "Clone", "Expand"))
