"""Pairs of saved-tensor hooks, each taken off autograd's stack once, also after an interrupt.

Autograd pops the hooks on top of its stack, whoever pushed them. An exception that is no
``Exception``, such as KeyboardInterrupt, may leave a scope's hooks behind, for PyTorch then calls
no hook at the end of a module's forward. So each thread knows its scopes in their order, and pops
hooks left behind when a scope around them ends, when a forward or a step begins, or when a handle
is removed.

    scope = HookScope()
    scope.enter(pack)
    scope.leave()  # and scopes inside whose hooks were left behind
    leave_all()    # the step is over, and so are its scopes on this thread
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from operator import methodcaller
from typing import Any

from torch import Tensor

from pp_offload._common.torch_private import pop_hooks, push_hooks
from pp_offload._hooks.regions import top_pack
from pp_offload._hooks.running import Caller, Running
from pp_offload._hooks.untraced import untraced

unpack: Callable[[Any], Tensor] = methodcaller("unpack")
"""The unpack hook of all scopes: gives what their pack hooks returned as it was saved."""


class _OfThread(threading.local):
    """The scopes of a thread, in order: autograd has a stack for each thread."""

    def __init__(self) -> None:
        self.scopes: list[HookScope] = []
        self.covered: list[weakref.ref[Any]] = []
        """Pack hooks of scopes that were left while somebody else's hooks were on top of them."""

        self.mark = object()


_here = _OfThread()


class HookScope:
    """One pair of hooks on the stack of the thread that entered it.

    Args:
        caller: The function that it belongs to, where it may last longer than a step.
    """

    __slots__ = ("_caller", "_pack")

    def __init__(self, caller: Caller | Running | None = None) -> None:
        self._caller = caller
        self._pack: Callable[[Tensor], Any] | None = None

    def enter(self, pack: Callable[[Tensor], Any]) -> None:
        """Save tensors through ``pack``, until the scope is left.

        Args:
            pack: Returns something with an ``unpack``. No other scope has this object.
        """
        self._pack = pack
        if _here.covered:
            _pop_uncovered()
        try:
            _here.scopes.append(self)  # first: known and not on the stack does no harm
            push_hooks(pack, untraced(unpack))
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Pop the hooks, and those that scopes inside left behind. A second call does nothing."""
        scopes = _here.scopes
        while self in scopes:
            if _here.covered:
                _pop_uncovered()
            pack, top = scopes[-1]._pack, top_pack()
            if pack is not None and top is pack:
                pop_hooks()
            elif pack is not None:
                _here.covered.append(weakref.ref(pack))
            scopes.pop()

    @property
    def is_entered(self) -> bool:
        """Whether its hooks are on the stack of this thread."""
        return self in _here.scopes

    @property
    def is_over(self) -> bool:
        """Whether, when a step begins, nobody will leave it any more."""
        return self._caller is None or not self._caller.is_running


def _pop_uncovered() -> None:
    """Pop hooks whose scope was left before that of hooks on top of them, which are gone by now.

    A generator that has entered hooks of its own, and outlives the forward that began it, does so.
    """
    covered = [pack for ref in _here.covered if (pack := ref()) is not None]
    while any(top_pack() is pack for pack in covered):
        pop_hooks()
    del covered  # or they are all alive
    _here.covered = [ref for ref in _here.covered if ref() is not None]


def is_in_scope() -> bool:
    """Whether this thread has entered a scope, and not left it."""
    return bool(_here.scopes)


def mark() -> object:
    """An object that is the same until :func:`leave_all` is called on this thread."""
    return _here.mark


def leave_all() -> bool:
    """Pop hooks left behind, down to a scope that somebody is still in; whether there were any."""
    if _here.covered:
        _pop_uncovered()
    _here.mark = object()
    scopes = _here.scopes
    num = len(scopes)
    while scopes and scopes[-1].is_over:
        if top_pack() is scopes[-1]._pack:
            pop_hooks()
        scopes.pop()
    return len(scopes) < num
