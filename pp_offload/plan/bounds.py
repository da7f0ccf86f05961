"""Bounds of an engine in numbers, chosen from the times of a step as the engine chooses them.

bounds = Bounds(OffloadConfig())
...                                # a step, whose rules have a watch
bounds.choose(rules.watch, kept=plan.kept, unused_bytes=2**33)
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

from pp_offload._groups.auto_bounds import NUM_TIMED, is_wanted, least_bounds, within
from pp_offload._groups.bounds import left_of_budget
from pp_offload._groups.plan import GroupKey
from pp_offload._groups.prefetch import SMALL_BYTES
from pp_offload._groups.step_times import StepTimes
from pp_offload._transfer.bound import Bound
from pp_offload._transfer.in_flight import IN_FLIGHT_BYTES
from pp_offload._transfer.stopwatch import Lap, Laps
from pp_offload.config import AUTO, OffloadConfig
from pp_offload.plan.device import NumberDevice
from pp_offload.simulate.clocks import VirtualEvent


class Watch:
    """Times a step, as an engine's stopwatch does.

    Args:
        device: Whose clocks tell.

    Attributes:
        reached: The group that backward reached last.
    """

    def __init__(self, device: NumberDevice) -> None:
        self.laps = Laps(device.compute.record_event())
        self.times = StepTimes(device.compute.record_event)
        self.reached: GroupKey | None = None
        self._device = device

    def copy(self, sizes: Sequence[int], *, to_host: bool) -> VirtualEvent:
        """As :meth:`NumberDevice.copy`."""
        device, laps = self._device, self.laps
        begin = (device.d2h if to_host else device.h2d).record_event()
        end = device.copy(sizes, to_host=to_host)
        (laps.offloads if to_host else laps.reloads).append(Lap(begin, end, sum(sizes)))
        return end

    def wait(self, event: VirtualEvent) -> None:
        """Compute waits for it."""
        compute = self._device.compute
        begin = compute.record_event()
        compute.wait_event(event)
        self.laps.waits.append(Lap(begin, compute.record_event(), 0))

    def left(self, group: GroupKey, nbytes: int) -> None:
        """A group was offloaded."""
        self.times.note(self.times.offloads, group, nbytes)

    def used(self, nbytes: int, num_waiting: int, num_uses: int) -> None:
        """Something that came back was used, and will be so often again."""
        is_first, is_last = num_waiting >= num_uses - 1, num_waiting <= 0
        self.times.note(self.times.uses, self.reached, nbytes * is_first, nbytes * is_last)


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
        left = left_of_budget(config)
        if left is not None:
            given = (config.max_in_flight_bytes, config.prefetch_bytes)
            most = left // max(1, given.count(AUTO))
            self.cap.limit(max(1, most))
            self.window.limit(most)

    def copied(self) -> Bounds:
        """Others that are the same so far."""
        other = copy.copy(self)
        other.cap, other.window = copy.copy(self.cap), copy.copy(self.window)
        return other

    def choose(self, watch: Watch, *, kept: Collection[GroupKey], unused_bytes: int | None) -> None:
        """Choose from the times of a step, if it is one of those that are timed.

        Args:
            watch: Timed it.
            kept: Groups that the next step keeps.
            unused_bytes: Of the device; None where it has no end.
        """
        if not self._num_left:
            return
        self._num_left -= 1
        least = least_bounds(watch.times, watch.laps, kept)
        if least is not None:
            now = self.cap.nbytes, self.window.nbytes
            cap_bytes, window_bytes = within(self._config, now, least, unused_bytes)
            self.cap.choose(cap_bytes)
            self.window.choose(window_bytes)
