"""Calls that undo what was done.

undo = UndoStack()
undo.add(restore, owner, name)  # before the change itself, so that no interrupt comes between
undo.run()                      # the last first; after an interrupt, call it again
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial


class UndoStack:
    """Calls that undo what was done. An interrupt may repeat a call, so each may run twice."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []

    def add(self, call: Callable[..., object], *args: object) -> None:
        self._calls.append(partial(call, *args))

    def run(self) -> None:
        while self._calls:
            self._calls[-1]()
            self._calls.pop()  # after the call: contextlib.ExitStack would lose one cut off
