"""Autograd's stack of saved-tensor hooks: regions where a checkpoint decides, and hooks of ours.

    is_in_region()           # a checkpoint gets tensors saved now
    is_in_backward()         # a backward runs this code
    is_left_to_checkpoint()  # either: groups and contexts do nothing

Our hooks are pushed and popped so that no exception or Ctrl-C leaves them behind.

    y = saving(pack, call, x)          # where the call is ours

    class Context:                     # where the ``with`` is the user's
        def __enter__(self):
            self.scope.enter(pack, self)

        @exact_exit
        def __exit__(self, *error):
            self.scope.leave()

NOTE [ Inside a checkpoint ]
    PyTorch's non-reentrant checkpoint finds saved tensors by position: the n-th of the
    recomputation is the n-th of the forward. Hooks inside its region would take tensors away from
    the checkpoint, and would have to take the same ones away when the region runs again. So we push
    no hooks inside a region, neither in forward nor in recomputation: the checkpoint drops and
    recomputes tensors saved there. The hook on top of autograd's stack shows the region. A
    reentrant checkpoint has no hooks: its region runs without grad, and again inside a backward.

NOTE [ Interrupts ]
    CPython runs signal handlers between bytecodes: where a Python function begins, where a loop
    goes back, and after a call; never inside a call into C.

    1. :func:`saving` pushes with a call into C inside ``try``, and pops with another, first in
       ``finally``: a ``deque`` that reads an iterator which pops. No Ctrl-C comes between.
    2. A user's ``with`` calls our ``__exit__``, a Python function, and Ctrl-C may come before its
       first line. But Python looks the bound ``__exit__`` up before it calls ``__enter__``, holds
       it as long as the ``with`` lasts, and drops it however the ``with`` ends. So
       :class:`exact_exit` makes a bound object for each ``with``, and :class:`HookScope` refers to
       this object weakly: when it is gone, a callback in C pops the hooks.

    Popping goes down to the hooks that were on top on entering. It also takes off hooks of
    interrupted scopes inside, and does nothing where nothing was pushed.

NOTE [ Transformer Engine ]
    TE's FP8 layers save a quantized copy of the weight with every microbatch. They mark the copy,
    by an attribute in ``MARKS`` of ``_core/eligibility.py``, only while TE's own offload is on.
    Only then do they hold the parameter for fused gradients, since hooks return a plain tensor in
    its place. So that switch, a variable of the process, is on while hooks of ours are in place;
    each generation of TE's offload has another. Source: Transformer Engine
    ``pytorch/cpu_offload.py`` and ``cpu_offload_v1.py``; Megatron-LM
    ``PipelineOffloadManager.__enter__``.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import starmap
from operator import countOf, itemgetter, methodcaller
from typing import Any, TypeVar

from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

from pp_offload._common.processes import logger_of
from pp_offload._common.torch_private import (
    end_checkpoints,
    graph_task_id,
    pop_hooks,
    push_hooks,
    top_hooks,
)
from pp_offload._common.undo import UndoStack
from pp_offload.errors import GroupStateError

logger = logger_of(__name__)

Pack = Callable[..., Any]
T = TypeVar("T")


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
    """Return an iterator that pops hooks until ``until`` is on top; all of them if None."""
    never = object()  # before each pop, zip asks for the top, and ends there
    return zip(iter(partial(top_hooks, True), until), iter(pop_hooks, never), strict=False)


# Regions


def is_in_region() -> bool:
    """Whether this code is inside a checkpoint that has hooks, in forward or in recomputation."""
    pack = _last_pack()
    if pack is None or isinstance(pack, PackHook):  # our hooks are never inside a checkpoint
        return False
    # Hooks of other code may pass tensors on to those of a checkpoint.
    return _is_checkpoint(pack) or any(map(_is_checkpoint, all_packs()))


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


def expected(call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return ``call(...)`` without warnings of groups inside: the user asked to recompute all."""
    before, _here.is_expected = _here.is_expected, True
    try:
        return call(*args, **kwargs)
    finally:
        _here.is_expected = before


class _OfThread(threading.local):
    is_expected = False
    last_exit: weakref.ref[_BoundExit] | None = None
    """The ``__exit__`` looked up last: by a ``with``, right before ``__enter__``."""


_here = _OfThread()

_warned: set[str] = set()


def _last_pack() -> Pack | None:
    """Return the pack hook that tensors saved now end up in, behind hooks that pass them on."""
    hooks = top_hooks(True)  # not top_pack(): this runs for each group
    pack: Pack | None = None if hooks is None else hooks[0]
    while isinstance(pack, Chaining):
        pack = pack.outer
    return pack


def _is_checkpoint(pack: Any) -> bool:
    return getattr(pack, "__module__", None) == torch_checkpoint.__name__


# Hooks of ours


unpack: Callable[[Any], Tensor] = methodcaller("unpack")
"""Unpack hook of all scopes: returns tensors as they were saved."""


def saving(pack: Pack | None, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return ``call(...)``, with tensors saved through ``pack``, which returns an object with an
    ``unpack``. None leaves the hooks as they are. See NOTE [ Interrupts ].
    """
    pops = popped(until=top_hooks(True))
    is_on = False
    try:
        if pack is not None:
            is_on = turn_on()
            push_hooks(pack, unpack)
        return call(*args, **kwargs)
    except BaseException as failure:
        end_checkpoints(failure)
        raise
    finally:
        deque(pops, maxlen=0)
        turn_off(is_on)


class HookScope:
    """The hooks of one ``with``, on the stack of the thread that entered it."""

    __slots__ = ("_exit", "_is_on", "_pack", "_pops", "_thread")

    def __init__(self) -> None:
        self._pack: Callable[[Tensor], Any] | None = None
        self._pops: Iterator[Any] = iter(())  # ends at once
        self._thread = threading.get_ident()
        self._is_on = False
        self._exit: weakref.ref[_BoundExit] | None = None  # of the ``with``

    def enter(self, pack: Callable[[Tensor], Any], owner: object) -> None:
        """Save tensors through ``pack``, which no other scope has and which returns an object with
        an ``unpack``, until the scope is left. ``owner`` has the ``__exit__`` of the ``with``.
        """
        self._pack = pack
        self._pops = pops = popped(until=top_hooks(True))
        self._exit = _exit_of(owner, partial(countOf, pops))  # which pops all, in C
        self._is_on = turn_on()
        push_hooks(pack, unpack)

    def leave(self, failure: BaseException | None = None) -> None:
        """Pop the hooks, and hooks that scopes inside did not pop. A second call does nothing."""
        end_checkpoints(failure)
        is_on, self._is_on = self._is_on, False
        turn_off(is_on)
        if self._thread != threading.get_ident():
            self._exit = None  # a generator that ends on a thread without our hooks
            return
        # If a scope around this one was left first, it has popped this one's hooks, too.
        if top_pack() is self._pack or self._pack in all_packs():
            deque(self._pops, maxlen=0)
        self._exit = self._pack = None
        self._pops = iter(())

    @property
    def is_over(self) -> bool:
        """Whether an interrupt has ended the ``with`` before its ``__exit__`` ran."""
        return self._exit is not None and self._exit() is None


class HookScopes(threading.local):
    """Scopes of an object that each thread has entered and not left, the innermost last."""

    def __init__(self) -> None:
        self.scopes: list[HookScope] = []

    def enter(self, scope: HookScope, begin: Callable[[Any], object]) -> None:
        """Enter a scope by ``begin(scope)``, behind scopes that an interrupt has ended."""
        while self.scopes and self.scopes[-1].is_over:
            self.leave()
        self.scopes.append(scope)  # first, or an interrupt would lose it
        try:
            begin(scope)
        except BaseException:
            self.leave()
            raise

    def leave(self, failure: BaseException | None = None) -> None:
        """Leave the innermost scope of this thread; raise a GroupStateError if it is in none."""
        if not self.scopes:
            raise GroupStateError(
                f"a context is left that thread {threading.get_ident()} did not enter; expected as "
                "many exits as entries, on the same thread; use it in a with statement"
            )
        self.scopes[-1].leave(failure)  # an interrupt in between would leave it again
        self.scopes.pop()


class _BoundExit(partial):  # type: ignore[type-arg]
    """An ``__exit__`` with its object, for a single ``with``."""

    @property
    def __func__(self) -> Callable[..., Any]:
        """As a method has it: a compiler asks for it."""
        return self.func


class exact_exit:  # noqa: N801  a decorator
    """Makes an ``__exit__`` behind which a :class:`HookScope` is left, even if it is cut off."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.__doc__ = function, function.__doc__

    def __get__(self, owner: object, kind: type | None = None) -> Callable[..., Any]:
        if owner is None:
            return self._function
        bound = _BoundExit(self._function, owner)
        _here.last_exit = weakref.ref(bound)
        return bound


def _exit_of(owner: object, when_gone: Callable[..., Any]) -> weakref.ref[_BoundExit] | None:
    """Return a reference to the last lookup, with a callback; None if of another object."""
    ref, _here.last_exit = _here.last_exit, None
    bound = None if ref is None else ref()
    if bound is None or bound.args[0] is not owner:
        return None
    return weakref.ref(bound, when_gone)


# The switch of Transformer Engine

SWITCHES = {
    "transformer_engine.pytorch.cpu_offload": ("CPUOffloadEnabled", "OFFLOAD_SYNCHRONIZER"),
    "transformer_engine.pytorch.cpu_offload_v1": ("CPUOffloadEnabled",),
}
"""Variables by module; each is off while it is False or None."""

_lock = threading.Lock()
_undo = UndoStack()
_num_on = 0


def turn_on() -> bool:
    """Turn the switch on; return False if Transformer Engine is not loaded."""
    global _num_on
    if "transformer_engine" not in sys.modules:
        return False
    with _lock:
        _num_on += 1
        for name, variables in SWITCHES.items():
            module = sys.modules.get(name)
            for variable in variables:
                if not getattr(module, variable, True):
                    _undo.set(module, variable, True)
    return True


def turn_off(is_on: bool) -> None:
    """Restore the switch when its last user has turned it off."""
    global _num_on
    if not is_on:
        return
    with _lock:
        _num_on -= 1
        if not _num_on:
            _undo.close()
