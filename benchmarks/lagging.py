"""A CPU whose copies are done at once and seen as done late, as copies of an accelerator are.

The copies cost what they cost the CPU, in the calling thread. What differs is what the engine has
to do while they count as under way: keep sources, ask events, let go later.

    use_backend(LaggingBackend(behind=3))
"""

from __future__ import annotations

import torch
from torch import Tensor

from pp_offload import CpuBackend


class LaggingEvent:
    """Has passed when its stream was given ``behind`` more copies, or somebody waited for it."""

    __slots__ = ("_number", "_stream")

    def __init__(self, stream: LaggingStream, number: int) -> None:
        self._stream = stream
        self._number = number

    def query(self) -> bool:
        """Whether it has passed."""
        return self._number <= self._stream.num_passed

    def synchronize(self) -> None:
        """Let it pass, with all before it."""
        stream = self._stream
        stream.num_passed = max(stream.num_passed, self._number)


class LaggingStream:
    """Counts copies, which are done when they are queued."""

    def __init__(self, behind: int) -> None:
        self.num_passed = 0
        self._num_queued = 0
        self._behind = behind
        self._last = LaggingEvent(self, 0)

    def queued(self) -> None:
        """One more copy."""
        self._num_queued += 1
        self.num_passed = max(self.num_passed, self._num_queued - self._behind)
        self._last = LaggingEvent(self, self._num_queued)

    def wait_event(self, event: LaggingEvent) -> None:
        """Nothing to wait for: whatever was queued anywhere has been done."""

    def record_event(self) -> LaggingEvent:
        """The event of the last copy."""
        return self._last


class LaggingBackend(CpuBackend):
    """Copies inline.

    Args:
        behind: How many copies must follow on a stream until one counts as done.
    """

    def __init__(self, *, behind: int) -> None:
        super().__init__()
        self.name = f"cpu, {behind} copies behind"
        self.d2h = LaggingStream(behind)
        self.h2d = LaggingStream(behind)

    def copy(
        self, stream: LaggingStream, targets: list[Tensor], sources: list[Tensor], label: str
    ) -> None:
        """Copy at once, and say so later."""
        torch._foreach_copy_(targets, sources)
        stream.queued()

    def synchronize(self) -> None:
        """Let all copies pass."""
        for stream in (self.d2h, self.h2d):
            stream.record_event().synchronize()
