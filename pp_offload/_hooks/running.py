"""Whether a call is still under way, for what an interrupt may have left behind it.

def compute(self) -> None:
    running = Running()        # the variable has this name
    self.left.append(running)  # running.is_running until compute() has ended, however it did
    ...

Of a function of somebody else's, which has no such variable, the frame tells:

    caller = Caller.of(1)          # whose ``with`` has called the function that this stands in
    caller.is_running
"""

from __future__ import annotations

import dis
import inspect
import sys
from types import FrameType


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


class Caller:
    """The function that has a ``with``; it may be asked whether it still runs.

    It is known by its frame's ``id`` and code: a frame that is kept would keep all its variables.
    """

    __slots__ = ("_code", "_number", "_place")

    def __init__(self, frame: FrameType) -> None:
        self._number, self._code, self._place = id(frame), frame.f_code, frame.f_lasti

    @classmethod
    def of(cls, depth: int) -> Caller:
        """The function ``depth`` frames further out than the one that asks."""
        return cls(sys._getframe(depth + 1))

    @property
    def is_running(self) -> bool:
        """Whether it runs, or may: code that enters by a call, as an ``ExitStack`` does, enters for
        others, and a generator waits while others run.
        """
        code = self._code
        if code.co_flags & _WAITS or code.co_code[self._place] != _WITH:
            return True
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if id(frame) == self._number and frame.f_code is code:
                return frame.f_lasti > self._place  # else a later call with the same id
            frame = frame.f_back
        return False


_WAITS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_WITH = dis.opmap.get("BEFORE_WITH")
"""None where Python has another instruction: such a scope ends when it is left."""
