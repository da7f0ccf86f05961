"""Bounds of an engine in numbers, chosen from the times of a step as the engine chooses them.

bounds = Bounds(OffloadConfig())
bounds.hold(engine)                # of a step
bounds.watch(engine, device)
...
bounds.choose(kept=plan.kept, unused_bytes=2**33, sent_bytes=2**30)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pp_offload._core.bound import IN_FLIGHT_BYTES, SMALL_BYTES, Bound
from pp_offload._core.engine import Engine
from pp_offload._core.keys import GroupKey
from pp_offload._groups.auto_bounds import GROWN, NUM_TIMED, StepTimes, least_bounds
from pp_offload._groups.bounds import is_wanted, within
from pp_offload._groups.plan import Plan
from pp_offload.config import OffloadConfig
from pp_offload.plan.device import NumberDevice


class Bounds:
    """How much may be in flight, and ahead.

    Args:
        config: Gives them, or leaves them to the engine.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self.cap = Bound(config.max_in_flight_bytes, IN_FLIGHT_BYTES)
        self.window = Bound(config.prefetch_bytes, SMALL_BYTES)
        self._config = config
        self._num_left = NUM_TIMED if is_wanted(config) else 0
        self._are_planned = False
        self._timed: StepTimes | None = None
        self._sent_when_timed = 0

    def follow(self, plan: Plan) -> None:
        """Go by a plan, if it has bounds; as ``AutoBounds.follow``."""
        self._are_planned = plan.bounds is not None
        if plan.bounds is not None:
            self._num_left = 0
            cap_bytes, window_bytes = plan.bounds
            self.cap.choose(cap_bytes)
            self.window.choose(window_bytes)

    def hold(self, engine: Engine) -> None:
        """Have the engine of a step keep to them."""
        engine.mover.in_flight.bound, engine.window.bound = self.cap, self.window
        engine.window.resize()

    def watch(self, engine: Engine, device: NumberDevice) -> None:
        """Time the step that begins, if it is one of those that are timed."""
        if not self._num_left:
            return
        backend: Any = device
        self._timed = StepTimes(device.timed_event(device.compute), backend)
        engine.observers.add(self._timed)

    def choose(
        self, *, kept: Collection[GroupKey], unused_bytes: int | None, sent_bytes: int
    ) -> None:
        """Choose from the times of a step, if it was timed; as ``AutoBounds`` between two steps.

        Args:
            kept: Groups that the next step keeps.
            unused_bytes: Of the device; None where it has no end.
            sent_bytes: That left in the step. Where more does than when it was timed, as with more
                room on the host, the next ones are timed again.
        """
        timed, self._timed = self._timed, None
        if self._are_planned:
            return
        if timed is None:
            if not self._num_left and 0 < self._sent_when_timed * GROWN < sent_bytes:
                self._num_left = NUM_TIMED
            return
        self._sent_when_timed = sent_bytes
        self._num_left -= 1
        least = least_bounds(timed, kept)
        if least is not None:
            now = self.cap.nbytes, self.window.nbytes
            cap_bytes, window_bytes = within(self._config, now, least, unused_bytes)
            self.cap.choose(cap_bytes)
            self.window.choose(window_bytes)
