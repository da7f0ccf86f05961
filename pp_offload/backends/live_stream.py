"""The live compute stream of a device that PyTorch knows nothing of.

class MadeUp(HasLiveStream[MadeUpStream]):
    def __init__(self):
        self._current = MadeUpStream()

with backend.stream(side):
    backend.current_stream()   # side
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

S = TypeVar("S")


class HasLiveStream(Generic[S]):
    """Knows which compute stream is current, for one thread."""

    _current: S

    def current_stream(self) -> S:
        """The live compute stream."""
        return self._current

    @contextmanager
    def stream(self, stream: S) -> Iterator[S]:
        """Make ``stream`` the live compute stream inside."""
        previous, self._current = self._current, stream
        try:
            yield stream
        finally:
            self._current = previous
