"""Regions where a checkpoint decides what is saved, and where code runs again.

    is_in_region()           # a checkpoint gets tensors saved now
    is_in_backward()         # a backward runs this code
    is_left_to_checkpoint()  # either: groups and contexts do nothing

NOTE [ Inside a checkpoint ]
    PyTorch's non-reentrant checkpoint finds saved tensors by position: the n-th of the
    recomputation is the n-th of the forward. Hooks inside its region would take tensors away from
    the checkpoint, and would have to take the same ones away when the region runs again. So we push
    no hooks inside a region, neither in forward nor in recomputation: the checkpoint drops and
    recomputes tensors saved there. The hook on top of autograd's stack shows the region. A
    reentrant checkpoint has no hooks: its region runs without grad, and again inside a backward.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import starmap
from operator import itemgetter
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from pp_offload._common.processes import logger_of
from pp_offload._common.torch_private import graph_task_id, pop_hooks, push_hooks, top_hooks

logger = logger_of(__name__)

Pack = Callable[..., Any]


class PackHook(partial):  # type: ignore[type-arg]
    """A pack hook of ours.

    Autograd calls it from inside an operator. Where ``torch.compile`` leaves a forward as it is, it
    would compile each function that is called there, and a compiled backward has the unpack hooks
    in it. So the functions of both are :func:`never_compiled`.
    """


class Chaining(PackHook):
    """A pack hook that passes tensors on to the hooks entered before it."""

    outer: Pack | None = None


def top_pack() -> Pack | None:
    """Return the pack hook that this thread saves tensors through, if any."""
    hooks = top_hooks(True)
    return None if hooks is None else hooks[0]


def is_in_region() -> bool:
    """Whether this code is inside a checkpoint that has hooks, in forward or in recomputation."""
    pack = _last_pack()
    if pack is None or isinstance(pack, PackHook):  # our hooks are never inside a checkpoint
        return False
    # Hooks of other code may pass tensors on to those of a checkpoint.
    return _is_checkpoint(pack) or any(map(_is_checkpoint, all_packs()))


def all_packs() -> list[Pack]:
    """Return the pack hooks of this thread, outermost first."""
    hooks: list[tuple[tuple[Pack, Pack], None]] = []
    # Each ``deque`` is one call in C, and no signal is handled before it ends.
    popping = map(partial(hooks.insert, 0), popped(until=None))
    pushing = starmap(push_hooks, map(itemgetter(0), hooks))
    try:
        deque(popping, maxlen=0)
        return [pack for (pack, _), _ in hooks]
    finally:
        deque(pushing, maxlen=0)


def popped(until: object) -> Iterator[tuple[Any, None]]:
    """Return an iterator that pops hooks until ``until`` is on top; all of them if None. Before
    each pop, zip asks for the top, and ends there.
    """
    never = object()
    return zip(iter(partial(top_hooks, True), until), iter(pop_hooks, never), strict=False)


def is_in_backward() -> bool:
    """Whether a backward runs this: what a forward inside it saves is needed at once."""
    return graph_task_id() != -1


def is_left_to_checkpoint() -> bool:
    """Whether groups and contexts do nothing here. See NOTE [ Inside a checkpoint ]."""
    return is_in_backward() or is_in_region()


def is_recomputing() -> bool:
    """Whether this code runs again: in a backward, or for a look at a saved tensor."""
    if graph_task_id() != -1:
        return True
    pack = _last_pack()
    if pack is None:  # nearly always
        return False
    name = getattr(pack, "__qualname__", "")
    return _is_checkpoint(pack) and name.startswith("_recomputation_hook.")


def warn_of_region(what: str) -> None:
    """Warn, once for each subject such as ``group 'mlp'``, that a checkpoint around it decides."""
    if _here.is_expected or what in _warned:
        return
    _warned.add(what)
    logger.warning(
        "%s is inside a checkpoint and does nothing there: the checkpoint drops and recomputes "
        "what is saved inside; put the checkpoint inside the group, or offload the inputs of the "
        "checkpoint with pp_offload.checkpoint(function, x, offload_inputs=True) or "
        "pp_offload.checkpoint_wrapper(module, offload_inputs=True)",
        what,
    )


def was_warned_of(what: str) -> bool:
    """Whether :func:`warn_of_region` has named ``what``."""
    return what in _warned


@contextmanager
def expected() -> Iterator[None]:
    """Warn of no groups inside on this thread: the user asked for a recomputation of all."""
    before, _here.is_expected = _here.is_expected, True
    try:
        yield
    finally:
        _here.is_expected = before


class _OfThread(threading.local):
    is_expected = False


_here = _OfThread()

_warned: set[str] = set()


def _last_pack() -> Pack | None:
    """Return the pack hook that tensors saved now end up in, behind hooks that pass them on."""
    hooks = top_hooks(True)
    if hooks is None:  # nearly always
        return None
    pack: Pack | None = hooks[0]
    while isinstance(pack, Chaining):
        pack = pack.outer
    return pack


def _is_checkpoint(pack: Any) -> bool:
    return getattr(pack, "__module__", None) == torch_checkpoint.__name__
