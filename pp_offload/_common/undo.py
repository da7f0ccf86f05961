"""Calls that undo what was done.

undo = UndoStack()
undo.set(owner, "name", value)   # an attribute
undo.wrap(owner, "step", timed)  # a method: timed(step, *args) is called in its place
undo.add(restore, owner)         # before a change itself, so that no interrupt comes between
undo.run()                       # the last first; after an interrupt, call it again
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any


class UndoStack:
    """Calls that undo what was done. An interrupt may repeat a call, so each may run twice."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []

    def add(self, call: Callable[..., object], *args: object) -> None:
        self._calls.append(partial(call, *args))

    def set(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute of an object, a class or a module, until :meth:`run`."""
        if name in vars(owner):
            self.add(setattr, owner, name, vars(owner)[name])
        else:  # it has that of a class, or none
            self.add(_remove, owner, name)
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Call ``around`` in place of a method, with the method first, until :meth:`run`."""
        inner = getattr(owner, name)

        @wraps(inner)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(inner, *args, **kwargs)

        self.set(owner, name, wrapper)

    def run(self) -> None:
        while self._calls:
            self._calls[-1]()
            self._calls.pop()  # after the call: contextlib.ExitStack would lose one cut off


def _remove(owner: Any, name: str) -> None:
    if name in vars(owner):
        delattr(owner, name)
