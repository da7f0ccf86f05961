"""Saved-tensor hooks that are off autograd's stack at once, whatever exception comes.

    y = saving(pack, call, x)          # where the call is ours

    class Context:                     # where the ``with`` is the user's
        def __enter__(self):
            self.scope.enter(pack, self)

        @exact_exit
        def __exit__(self, *error):
            self.scope.leave()

NOTE [ Interrupts ]
    CPython handles signals where a Python function begins, where a loop goes back, and after a
    call. So what a signal handler raises never comes between entering ``try`` and the call in C
    that pushes, nor between entering ``finally`` and a call in C that pops all: ``saving`` is
    exact. A ``__exit__`` in Python may be cut off before its first line, and the traceback then
    keeps all that its frame refers to. But the bound ``__exit__`` itself is only on the stack of
    the function with the ``with``, and is gone when that unwinds. So each ``with`` gets one of its
    own, and a weak reference to it pops the hooks, with a callback in C.

    Popping goes down to the hooks that were on top on entering. It also takes off what others were
    cut off with inside, and does nothing where nothing was pushed.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from operator import countOf, methodcaller
from typing import Any, TypeVar

from torch import Tensor

from pp_offload._common.torch_private import end_checkpoints, push_hooks, top_hooks
from pp_offload._hooks.regions import all_packs, popped, top_pack
from pp_offload._hooks.transformer_engine import turn_off, turn_on

T = TypeVar("T")

unpack: Callable[[Any], Tensor] = methodcaller("unpack")
"""The unpack hook of all scopes: gives what their pack hooks returned as it was saved."""


def saving(
    pack: Callable[[Tensor], Any] | None, call: Callable[..., T], *args: Any, **kwargs: Any
) -> T:
    """What ``call`` returns, with tensors saved through ``pack``. See NOTE [ Interrupts ].

    Args:
        pack: Returns something with an ``unpack``. None leaves the hooks as they are.
        call: Computes.
        args: Of ``call``.
        kwargs: Of ``call``.
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

    __slots__ = ("_is_on", "_pack", "_pops", "_thread", "_with")

    def __init__(self) -> None:
        self._pack: Callable[[Tensor], Any] | None = None
        self._pops: Iterator[Any] = iter(())  # ends at once
        self._thread = threading.get_ident()
        self._is_on = False
        self._with: weakref.ref[_Bound] | None = None

    def enter(self, pack: Callable[[Tensor], Any], owner: object) -> None:
        """Save tensors through ``pack``, until the scope is left.

        Args:
            pack: Returns something with an ``unpack``. No other scope has this object.
            owner: Has the ``__exit__`` of the ``with``.
        """
        self._pack = pack
        self._pops = pops = popped(until=top_hooks(True))
        self._with = _here.entering(owner, partial(countOf, pops))
        self._is_on = turn_on()
        push_hooks(pack, unpack)

    def leave(self, failure: BaseException | None = None) -> None:
        """Pop the hooks, and what was left inside. A second call does nothing.

        Args:
            failure: What the ``with`` raised.
        """
        end_checkpoints(failure)
        is_on, self._is_on = self._is_on, False
        turn_off(is_on)
        if self._thread != threading.get_ident():
            self._with = None  # a generator that ends elsewhere: no hook of that thread is ours
            return
        # Where a scope around this one was left first, its hooks are off with those of that.
        if top_pack() is self._pack or self._pack in all_packs():
            deque(self._pops, maxlen=0)
        self._with = self._pack = None
        self._pops = iter(())

    @property
    def is_over(self) -> bool:
        """Whether an interrupt has ended the ``with`` before its ``__exit__`` ran."""
        return self._with is not None and self._with() is None


class _Bound(partial):  # type: ignore[type-arg]
    """An ``__exit__`` with its object."""

    @property
    def __func__(self) -> Callable[..., Any]:
        """As of a method: a compiler asks for it."""
        return self.func


class exact_exit:  # noqa: N801  a decorator
    """Makes an ``__exit__`` behind which a :class:`HookScope` is left, even if it is cut off."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, owner: object, kind: type | None = None) -> Callable[..., Any]:
        if owner is None:
            return self._function
        bound = _Bound(self._function, owner)
        _here.bound = weakref.ref(bound)
        return bound


class _OfThread(threading.local):
    """The ``__exit__`` that was looked up last: by a ``with``, right before its ``__enter__``."""

    def __init__(self) -> None:
        self.bound: weakref.ref[_Bound] | None = None

    def entering(self, owner: object, callback: Callable[..., Any]) -> weakref.ref[_Bound] | None:
        """A reference to that of ``owner``, which calls back when it is gone; None without one."""
        looked_up, self.bound = self.bound, None
        bound = None if looked_up is None else looked_up()
        if bound is None or bound.args[0] is not owner:
            return None
        return weakref.ref(bound, callback)


_here = _OfThread()
