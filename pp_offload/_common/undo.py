"""Changes of attributes that are undone together, the last first.

with UndoStack() as undo:            # or close(), later
    undo.set(owner, "name", value)   # an attribute
    undo.wrap(owner, "step", timed)  # a method: timed(step, *args) is called in its place
    undo.callback(restore, owner)    # before a change itself, so that no interrupt comes between
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any


class UndoStack(ExitStack):
    def set(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute of an object, a class or a module, until :meth:`close`."""
        if name in vars(owner):
            self.callback(setattr, owner, name, vars(owner)[name])
        else:  # it has that of a class, or none
            self.callback(_remove, owner, name)
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Call ``around`` in place of a method, with the method first, until :meth:`close`."""
        inner = getattr(owner, name)

        @wraps(inner)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(inner, *args, **kwargs)

        self.set(owner, name, wrapper)


def _remove(owner: Any, name: str) -> None:
    if name in vars(owner):
        delattr(owner, name)
