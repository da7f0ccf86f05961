"""Push and pop autograd's saved-tensor hooks, so that no exception or Ctrl-C leaves them behind.

    y = saving(pack, call, x)          # where the call is ours

    class Context:                     # where the ``with`` is the user's
        def __enter__(self):
            self.scope.enter(pack, self)

        @exact_exit
        def __exit__(self, *error):
            self.scope.leave()

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
from operator import countOf, methodcaller
from types import ModuleType
from typing import Any, TypeVar

from torch import Tensor

from pp_offload._common.torch_private import end_checkpoints, push_hooks, top_hooks
from pp_offload._hooks.regions import all_packs, popped, top_pack
from pp_offload.errors import GroupStateError

T = TypeVar("T")

unpack: Callable[[Any], Tensor] = methodcaller("unpack")
"""Unpack hook of all scopes: returns tensors as they were saved."""


def saving(
    pack: Callable[[Tensor], Any] | None, call: Callable[..., T], *args: Any, **kwargs: Any
) -> T:
    """Return ``call(...)``, with tensors saved through ``pack``. See NOTE [ Interrupts ].

    Args:
        pack: Returns an object with an ``unpack``. None leaves the hooks as they are.
        call: Function that computes.
        args, kwargs: Arguments of ``call``.
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
        """Save tensors through ``pack``, until the scope is left.

        Args:
            pack: Returns an object with an ``unpack``. No other scope has this pack.
            owner: Object with the ``__exit__`` of the ``with``.
        """
        self._pack = pack
        self._pops = pops = popped(until=top_hooks(True))
        self._exit = _lookups.of(owner, partial(countOf, pops))  # which pops all, in C
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
        """Leave the innermost scope of this thread.

        Raises:
            GroupStateError: This thread is in none.
        """
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
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, owner: object, kind: type | None = None) -> Callable[..., Any]:
        if owner is None:
            return self._function
        bound = _BoundExit(self._function, owner)
        _lookups.last = weakref.ref(bound)
        return bound


class _Lookups(threading.local):
    """The ``__exit__`` that a thread looked up last: by a ``with``, right before ``__enter__``."""

    def __init__(self) -> None:
        self.last: weakref.ref[_BoundExit] | None = None

    def of(self, owner: object, when_gone: Callable[..., Any]) -> weakref.ref[_BoundExit] | None:
        """Return a reference to the last lookup, with a callback; None if of another object."""
        ref, self.last = self.last, None
        bound = None if ref is None else ref()
        if bound is None or bound.args[0] is not owner:
            return None
        return weakref.ref(bound, when_gone)


_lookups = _Lookups()

SWITCHES = {
    "transformer_engine.pytorch.cpu_offload": ("CPUOffloadEnabled", "OFFLOAD_SYNCHRONIZER"),
    "transformer_engine.pytorch.cpu_offload_v1": ("CPUOffloadEnabled",),
}
"""Variables by module; each is off while it is False or None."""

_lock = threading.Lock()
_before: list[tuple[ModuleType, str, Any]] = []
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
                value = getattr(module, variable, True)
                if module is not None and not value:
                    _before.append((module, variable, value))
                    setattr(module, variable, True)
    return True


def turn_off(is_on: bool) -> None:
    """Restore the switch when its last user has turned it off."""
    global _num_on
    if not is_on:
        return
    with _lock:
        _num_on -= 1
        while not _num_on and _before:
            setattr(*_before.pop())
