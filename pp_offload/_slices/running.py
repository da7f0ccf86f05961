"""Whether a call is still under way, for what an interrupt may have left behind it.

def compute(self) -> None:
    running = Running()        # the variable has this name
    self.left.append(running)  # running.is_running until compute() has ended, however it did
    ...
"""

from __future__ import annotations

import sys


class Running:
    """The call of a function that has this object as its variable ``running``.

    No frame is kept, which would keep all its variables.
    """

    __slots__ = ("_code",)

    def __init__(self) -> None:
        self._code = sys._getframe(1).f_code

    @property
    def is_running(self) -> bool:
        """Whether the call is among those that this thread is in."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code is self._code and frame.f_locals.get("running") is self:
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False
