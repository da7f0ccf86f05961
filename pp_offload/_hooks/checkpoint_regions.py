"""Has hooks take the same tensors from a checkpoint in its recomputation as in its forward.

PyTorch's non-reentrant checkpoint finds saved tensors by position: the n-th of the recomputation is
the n-th of the forward. A scope of other hooks inside the region takes tensors away from the
checkpoint, and has to take the same ones away again, whatever chunk or option is current by then.
So each scope that begins right inside a region is noted with the region, and the n-th scope of a
recomputation does what the n-th of the forward did.

    forward                            recomputation
    "attn" took tensors  --noted-->    "attn" takes them again, and they stay on the device
    "mlp" did nothing    --noted-->    "mlp" does nothing

    top = top_pack()                              # on entering
    takes = takes_again(top, "attn", wants=True)  # None says that it is a forward
    note(top, "attn", took=True)                  # in a forward inside hooks, before ours

NOTE [ PyTorch's checkpoint ]
    The checkpoint tells nobody that a region begins, so a region is recognised by the hooks on top
    of autograd's stack: their closures hold the region's frame, which lives as long as its graph,
    and those of a recomputation also its number. Where a version of PyTorch has other hooks, scopes
    inside leave everything to the checkpoint, both times, which is always right.

NOTE [ Recomputed whole ]
    A group inside a region keeps its tensors from being recomputed. Where all is to be recomputed,
    :func:`without_groups` is entered in the forward and in the recomputation, on whichever thread
    that runs, and groups inside do nothing.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from pp_offload._common.torch_private import graph_task_id, top_hooks
from pp_offload._hooks.untraced import Untraced
from pp_offload.errors import GroupStateError

Pack = Callable[..., Any]


class Saving(Untraced):
    """A pack hook of ours, entered in a forward that is no recomputation."""


class Keeping(Untraced):
    """A pack hook of ours, entered in a recomputation."""


class Chaining(Untraced):
    """A pack hook of ours that passes tensors on to the hooks entered before it."""

    outer: Pack | None = None


def top_pack() -> Pack | None:
    """The pack hook that this thread saves tensors through, if any."""
    hooks = top_hooks(True)
    return None if hooks is None else hooks[0]


def is_in_region() -> bool:
    """Whether a checkpoint gets what is saved now, and drops it."""
    return is_checkpoint(_getter(top_pack()))


def is_checkpoint(pack: Pack | None) -> bool:
    """Whether the hook is one of a checkpoint."""
    return getattr(pack, "__module__", None) == torch_checkpoint.__name__


def has_ended(pack: Pack | None) -> bool:
    """Whether the hook is of a checkpoint whose forward is over: it popped another in its place."""
    frame = _frame_of(pack)
    return frame is not None and frame.forward_completed


def is_in_backward() -> bool:
    """Whether a backward runs this: a forward inside it is a recomputation, used at once."""
    return graph_task_id() != -1


def is_recomputing() -> bool:
    """Whether this code runs again: in a backward, or for somebody who looks at a saved tensor."""
    return is_in_backward() or _is_again(_getter(top_pack()))


def takes_again(top: Pack | None, name: str, *, wants: bool) -> bool | None:
    """What a scope that is entered now has to do.

    Args:
        top: What :func:`top_pack` says.
        name: Of the scope, for messages.
        wants: Whether it would take tensors in a forward. It counts only inside hooks that are
            unknown here, for those may pass tensors on to a checkpoint.

    Returns:
        None in a forward, where the caller decides; else whether to take tensors away. That is
        False in the forward of a region that is unknown here.

    Raises:
        GroupStateError: The region's forward had another scope here.
    """
    pack = None if top is None else _getter(top)
    if pack is None:  # nearly always
        return False if is_in_backward() or _here.is_without_groups else None
    if _is_recomputation(pack):
        run = getattr(pack, _RUN, None)
        return run is not None and run.next(name)
    if may_take(pack):
        return None
    note(pack, name, took=False)
    return wants and not _is_known_hook(pack)


def may_leave_out() -> bool:
    """Whether a scope that begins in a forward may take nothing, as one without offload.

    A recomputation finds noted what the forward did. Inside hooks that are unknown here nothing is
    noted, and scopes take tensors both times.
    """
    pack = _getter(top_pack())
    return pack is None or _is_known_hook(pack)


def may_take(top: Pack | None) -> bool:
    """Whether groups may be begun and ended here: in a forward, and in no unknown region."""
    if is_in_backward() or _here.is_without_groups:
        return False
    if top is None:  # nearly always
        return True
    pack = _getter(top)
    is_known = not is_checkpoint(pack) or _frame_of(pack) is not None
    return is_known and not _is_again(pack)


@contextmanager
def without_groups() -> Iterator[None]:
    """Groups that begin inside, on this thread, do nothing. See NOTE [ Recomputed whole ]."""
    was_without, _here.is_without_groups = _here.is_without_groups, True
    try:
        yield
    finally:
        _here.is_without_groups = was_without


def leave_regions() -> None:
    """This thread is in no region any more: an interrupt may have left :func:`without_groups`."""
    _here.is_without_groups = False


class _OfThread(threading.local):
    """The regions that a thread is in."""

    def __init__(self) -> None:
        self.is_without_groups = False


_here = _OfThread()


def note(top: Pack, name: str, *, took: bool) -> None:
    """Note a scope that begins in a forward with the region right around it, if there is one."""
    frame = _frame_of(_getter(top))
    if frame is None:
        return
    region = _region_of(frame)
    if took and not any(scope.took for scope in region.scopes):
        frame.recompute_fn = _Recomputation(frame.recompute_fn, region.scopes)
    region.scopes.append(_Scope(name, took, len(frame.weak_holders)))


_REGION, _RUN = "_pp_offload_region", "_pp_offload_run"


@dataclass(frozen=True, slots=True)
class _Scope:
    """A scope of a region's forward."""

    name: str
    took: bool
    """Whether it kept tensors from the checkpoint."""

    num_before: int
    """Tensors that the region had saved by then."""


class _Region:
    """What is known of a region. An attribute of PyTorch's frame, so that it goes with that: an
    entry of a weak table would run Python code then.
    """

    __slots__ = ("is_again", "scopes")

    def __init__(self, is_again: bool) -> None:
        self.is_again = is_again
        self.scopes: list[_Scope] = []


class _Recomputation:
    """Wraps what PyTorch runs again, and checks that every scope that took tensors was entered.

    It refers to no frame: the frame refers to it, and a cycle would wait for garbage collection.
    """

    def __init__(self, run_again: Callable[..., None], scopes: list[_Scope]) -> None:
        self._run_again = run_again
        self._scopes = scopes

    def __call__(self, *args: Any) -> None:
        """Run the region's function again.

        Raises:
            GroupStateError: It came to other scopes than in the forward.
        """
        pack = top_pack()
        run = _Run(pack, self._scopes)
        setattr(pack, _RUN, run)  # each run counts for itself, on whichever thread
        try:
            self._run_again(*args)
        except Exception as error:
            if type(error).__module__ == torch_checkpoint.__name__:  # it stopped early
                run.check_taken()
            raise
        run.check_taken()


class _Run:
    """One recomputation of a region."""

    def __init__(self, pack: Pack | None, scopes: list[_Scope]) -> None:
        closure = _closure(inspect.unwrap(pack)) if pack is not None else {}
        self._frame, self._gid = closure["target_frame_ref"], closure["gid"]
        self._scopes = scopes
        self._num_entered = 0

    def next(self, name: str) -> bool:
        """Whether the scope that is entered now takes tensors away."""
        number, self._num_entered = self._num_entered, self._num_entered + 1
        if number < len(self._scopes):
            scope = self._scopes[number]
            if (scope.name, scope.num_before) != (name, self._num_saved):
                raise self._other(number, f"'{name}', behind {self._num_saved} saved tensors,")
            return scope.took
        if self._frame().forward_completed:
            raise self._other(number, f"'{name}'")
        return False  # a backward inside the forward, which has not come this far

    def check_taken(self) -> None:
        """Raise if a scope that took tensors was not entered, and later ones were saved already."""
        for number in range(self._num_entered, len(self._scopes)):
            scope = self._scopes[number]
            if scope.took and scope.num_before < self._num_saved:
                raise self._other(number, "none")

    @property
    def _num_saved(self) -> int:
        return int(self._frame().recomp_counter[self._gid])

    def _other(self, number: int, found: str) -> GroupStateError:
        expected = "none"
        if number < len(self._scopes):
            scope = self._scopes[number]
            expected = f"'{scope.name}', behind {scope.num_before} saved tensors"
        return GroupStateError(
            f"a checkpoint runs its function again, and finds {found} as scope number {number + 1} "
            f"inside; expected {expected}, as in its forward; until backward is done run the same "
            "groups, and keep the handles of offload_modules and attach"
        )


def _getter(top: Pack | None) -> Pack | None:
    """The pack hook that tensors saved now end up in, behind those that pass them on."""
    while isinstance(top, Chaining):
        top = top.outer
    return top


def _is_known_hook(pack: Pack) -> bool:
    return isinstance(pack, Saving | Keeping) or is_checkpoint(pack)


def _is_again(pack: Pack | None) -> bool:
    """Whether hooks show that a checkpoint, maybe further out, runs its function again."""
    if pack is None or isinstance(pack, Saving):
        return False
    if isinstance(pack, Keeping) or _is_recomputation(pack):
        return True
    frame = _frame_of(pack)
    return _runs_again() if frame is None else _region_of(frame).is_again


def _runs_again() -> bool:
    """Whether a checkpoint's second run is among the callers: hooks show only the innermost one."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "recompute_fn":
            if frame.f_globals.get("__name__") == torch_checkpoint.__name__:
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _region_of(frame: Any) -> _Region:
    region = getattr(frame, _REGION, None)
    if region is None:
        region = _Region(is_in_backward() or _runs_again())
        setattr(frame, _REGION, region)
    return region


def _is_recomputation(pack: Pack) -> bool:
    return is_checkpoint(pack) and pack.__qualname__.startswith("_recomputation_hook.")


def _frame_of(pack: Pack | None) -> Any:
    """The frame of the region whose forward runs. See NOTE [ PyTorch's checkpoint ]."""
    if not _is_known or not is_checkpoint(pack):
        return None
    frame = _closure(pack).get("frame") if pack is not None else None
    return frame if all(hasattr(frame, name) for name in _FRAME) else None


_FRAME = ("recompute_fn", "weak_holders", "recomp_counter", "forward_completed")


def _closure(function: Any) -> dict[str, Any]:
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _shares(kind: str, *names: str) -> bool:
    """Whether the hooks made by a class of PyTorch's have these names in their closures."""
    made_by = getattr(getattr(torch_checkpoint, kind, None), "__init__", None)
    return {*names} <= {*getattr(getattr(made_by, "__code__", None), "co_cellvars", ())}


_is_known = _shares("_checkpoint_hook", "frame") and _shares(
    "_recomputation_hook", "target_frame_ref", "gid"
)
