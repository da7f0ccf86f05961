"""Bounds of an engine in numbers, chosen from the times of a step as the engine chooses them.

bounds = Bounds(OffloadConfig())
...                                # a step, whose rules have a watch
bounds.choose(rules.watch, kept=plan.kept, unused_bytes=2**33)
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

from pp_offload._core.observer import Lap
from pp_offload._core.stopwatch import Laps
from pp_offload._policy.bound import Bound
from pp_offload._policy.bounds import (
    IN_FLIGHT_BYTES,
    SMALL_BYTES,
    is_wanted,
    left_of_budget,
    planned_bounds,
    within,
)
from pp_offload._policy.plan import ChunkKey, GroupKey, Plan
from pp_offload._steps.auto_bounds import GROWN, NUM_TIMED, least_bounds
from pp_offload._steps.step_times import StepTimes
from pp_offload.config import AUTO, OffloadConfig
from pp_offload.plan.device import NumberDevice
from pp_offload.simulate.clocks import VirtualEvent


class Unwatched:
    """A step that nobody times, for no bounds are chosen from it.

    Args:
        device: Where it runs.
    """

    def __init__(self, device: NumberDevice) -> None:
        self._device = device

    def copy(self, sizes: Sequence[int], *, to_host: bool) -> VirtualEvent:
        """As :meth:`NumberDevice.copy`."""
        return self._device.copy(sizes, to_host=to_host)

    def wait(self, event: VirtualEvent) -> None:
        """Compute waits for it."""
        self._device.compute.wait_until(event.time_s)

    def left(self, chunk: ChunkKey, position: int, nbytes: int) -> None:
        """A group was offloaded."""

    def reached(self, chunk: ChunkKey, position: int) -> None:
        """Backward is at a group."""

    def used(self, nbytes: int, num_waiting: int, num_uses: int) -> None:
        """Something that came back was used, and will be so often again."""


class Watch(Unwatched):
    """Times a step, as an engine's stopwatch does.

    Args:
        device: Whose clocks tell.
    """

    def __init__(self, device: NumberDevice) -> None:
        super().__init__(device)
        self.laps = Laps(device.compute.record_event())
        self.times = StepTimes(device.compute.record_event)
        self._reached: GroupKey | None = None

    def copy(self, sizes: Sequence[int], *, to_host: bool) -> VirtualEvent:
        device, laps = self._device, self.laps
        begin = (device.d2h if to_host else device.h2d).record_event()
        end = device.copy(sizes, to_host=to_host)
        (laps.offloads if to_host else laps.reloads).append(Lap(begin, end, sum(sizes)))
        return end

    def wait(self, event: VirtualEvent) -> None:
        compute = self._device.compute
        begin = compute.record_event()
        compute.wait_event(event)
        self.laps.waits.append(Lap(begin, compute.record_event(), 0))

    def left(self, chunk: ChunkKey, position: int, nbytes: int) -> None:
        self.times.note(self.times.offloads, GroupKey(chunk, position), nbytes)

    def reached(self, chunk: ChunkKey, position: int) -> None:
        self._reached = GroupKey(chunk, position)

    def used(self, nbytes: int, num_waiting: int, num_uses: int) -> None:
        is_first, is_last = num_waiting >= num_uses - 1, num_waiting <= 0
        self.times.note(self.times.uses, self._reached, nbytes * is_first, nbytes * is_last)


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
        self._sent_when_timed = 0
        left = left_of_budget(config)
        if left is not None:
            given = (config.max_in_flight_bytes, config.prefetch_bytes)
            most = left // max(1, given.count(AUTO))
            self.cap.limit(max(1, most))
            self.window.limit(most)

    def follow(self, plan: Plan) -> None:
        """Go by a plan, if it has bounds; as ``AutoBounds.follow``."""
        self._are_planned = plan.bounds is not None
        if plan.bounds is not None:
            self._num_left = 0
            cap_bytes, window_bytes = planned_bounds(self._config, plan.bounds)
            self.cap.choose(cap_bytes)
            self.window.choose(window_bytes)

    def copied(self) -> Bounds:
        """Others that are the same so far."""
        other = copy.copy(self)
        other.cap, other.window = copy.copy(self.cap), copy.copy(self.window)
        return other

    def watch(self, device: NumberDevice) -> Unwatched:
        """Times the step that begins on the device, if it is one of those that are timed."""
        return Watch(device) if self._num_left else Unwatched(device)

    def choose(
        self,
        watch: Unwatched,
        *,
        kept: Collection[GroupKey],
        unused_bytes: int | None,
        sent_bytes: int,
    ) -> None:
        """Choose from the times of a step, if it was timed; as ``AutoBounds`` between two steps.

        Args:
            watch: Of the step.
            kept: Groups that the next step keeps.
            unused_bytes: Of the device; None where it has no end.
            sent_bytes: That left in the step. Where more does than when it was timed, as with more
                room on the host, the next ones are timed again.
        """
        if self._are_planned:
            return
        if not isinstance(watch, Watch):
            if not self._num_left and 0 < self._sent_when_timed * GROWN < sent_bytes:
                self._num_left = NUM_TIMED
            return
        self._sent_when_timed = sent_bytes
        self._num_left -= 1
        least = least_bounds(watch.times, watch.laps, kept)
        if least is not None:
            now = self.cap.nbytes, self.window.nbytes
            cap_bytes, window_bytes = within(self._config, now, least, unused_bytes)
            self.cap.choose(cap_bytes)
            self.window.choose(window_bytes)
