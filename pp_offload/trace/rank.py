"""The recording of one rank: which steps, and through a change of engines.

trace = RankTrace(manager, rank, range(2, 4), max_events, {})
trace.begin(tell)   # tell() is called when the steps are over
...
trace.end()
trace.timeline
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from pp_offload._groups.manager import Manager
from pp_offload._groups.offloader import Offloader
from pp_offload.errors import NotWhileCapturingError
from pp_offload.trace.assembled import assembled
from pp_offload.trace.events import Timeline
from pp_offload.trace.notes import Room
from pp_offload.trace.recorder import Recorder

logger = logging.getLogger(__name__)


class RankTrace:
    """Follows a manager, and records the steps that are asked for.

    Args:
        manager: Whose steps.
        rank: How the timeline calls it.
        steps: Which ones; None for all.
        max_events: When recording stops.
        known: What else there is to know of it, for the file.

    Attributes:
        timeline: What was recorded; None before the end.
    """

    def __init__(
        self,
        manager: Manager,
        rank: int,
        steps: range | None,
        max_events: int,
        known: dict[str, Any],
    ) -> None:
        self.timeline: Timeline | None = None
        self._manager = manager
        self._rank = rank
        self._steps = steps
        self._room = Room(max_events)
        self._known = known
        self._tell: Callable[[], None] = lambda: None
        self._step = -1
        self._offloader: Offloader | None = None
        self._recorder: Recorder | None = None
        self._numbers: list[int] = []
        self._is_cut = False

    def begin(self, tell: Callable[[], None]) -> None:
        """Follow the manager, and record at once if all steps are asked for."""
        self._tell = tell
        self._offloader = self._manager.offloader
        self._manager.on_begin = (*self._manager.on_begin, self._begin)
        if self._steps is None:
            self._record()

    def _record(self) -> None:
        recorder = Recorder(self._manager.offloader, self._room)
        if recorder.begin():
            self._recorder = recorder

    def _begin(self) -> None:
        """A step begins, or the manager goes on with another engine; waiting is allowed."""
        if self.timeline is not None:
            return
        if self._offloader is not self._manager.offloader:
            self._begin_anew()
            return
        self._step += 1
        steps = self._steps
        if steps is not None and self._step >= steps.stop and not self._is_capturing:
            self.end()
            self._tell()
            return
        if self._recorder is None and (steps is None or self._step in steps):
            self._record()
        if self._recorder is not None:
            self._recorder.step(self._step)
            self._numbers.append(self._step)

    def _begin_anew(self) -> None:
        """Go on with another engine: one that has recorded steps is left alone with them."""
        self._offloader = self._manager.offloader
        old, self._recorder = self._recorder, None
        if old is not None:
            old.stop()
            if old.marks or old.steps:
                self._is_cut = True
                logger.warning("configure() was called while a trace ran: it begins anew")
        self._numbers.clear()
        if old is not None:
            self._record()

    @property
    def _is_capturing(self) -> bool:
        return self._manager.backend.is_capturing

    def end(self) -> None:
        """Record no more, and make the timeline. Waits for what was recorded. Twice is fine.

        Raises:
            NotWhileCapturingError: A graph is captured, and nothing can be waited for.
        """
        if self.timeline is not None:
            return
        manager = self._manager
        manager.on_begin = tuple(tell for tell in manager.on_begin if tell != self._begin)
        recorder = self._recorder
        if recorder is None:
            self.timeline = Timeline(0, metadata={self._rank: self._known | {"steps": []}})
            return
        if self._is_capturing:
            recorder.stop()
            raise NotWhileCapturingError(
                "a trace ends while a graph is captured, and no event can be asked for its time; "
                "leave its block after the capture"
            )
        recorder.end()
        if self._room.is_full:
            logger.warning(
                "a trace has its %d events, and what came then is missing; ask for fewer steps, or "
                "for more events",
                self._room.most,
            )
        self.timeline = assembled(recorder, self._rank, self._facts(recorder))

    def _facts(self, recorder: Recorder) -> dict[str, Any]:
        assert recorder.clock is not None
        return self._known | {
            "device": self._manager.backend.name,
            "clock": recorder.clock.kind,
            "drift_s": recorder.drift_s,
            "steps": self._numbers,
            "is_truncated": self._room.is_full,
            "has_captures": recorder.is_captured,
            "began_anew": self._is_cut,
        }
