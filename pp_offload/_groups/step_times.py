"""When a step's groups left and what came back was used, by the device's clock.

times = StepTimes(partial(laps.now, backend))
observers.add(times)
...
clock = clock_without_waits(laps)
[clock(use.at) for use in times.uses]
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pp_offload._core.bound import SMALL_BYTES
from pp_offload._core.group import Group, GroupState
from pp_offload._core.keys import GroupKey
from pp_offload._core.observer import Lap, Observer
from pp_offload._core.payloads import Payloads
from pp_offload._core.saved import Saved
from pp_offload._core.stopwatch import Laps, seconds
from pp_offload.backends import TimedEvent


@dataclass(slots=True)
class Mark:
    """A point of compute's time at which a group was offloaded, or some of it was used."""

    group: GroupKey
    at: TimedEvent
    nbytes: int
    freed: int = 0
    """Of what is used for the last time."""


class StepTimes(Observer):
    """Marks when groups leave, and when what came back is used.

    Args:
        now: Gives an event on the live compute stream; None where nothing can be timed.

    Attributes:
        offloads: In order.
        uses: In order; small ones that follow each other are added up.
    """

    def __init__(self, now: Callable[[], TimedEvent | None]) -> None:
        self.offloads: list[Mark] = []
        self.uses: list[Mark] = []
        self._now = now
        self._reached: GroupKey | None = None

    def closed(self, group: Group, payloads: Payloads | None) -> None:
        if group.state is GroupState.OFFLOADED:
            self.note(self.offloads, group.key, group.counts.copied_bytes)

    def reached(self, group: Group) -> None:
        self._reached = group.key

    def used(self, saved: Saved, payload: object) -> None:
        """A first use, unless it came by no copy: then there is nothing to be ahead of."""
        batch, index = saved.batch, saved.index
        reload = batch.back.reloads[index]
        if reload is None or reload.event is None:
            return
        nbytes, left = batch.sizes[index], batch.back.left[index]
        is_first, is_last = left >= batch.back.uses[index] - 1, left <= 0
        self.note(self.uses, self._reached, nbytes * is_first, nbytes * is_last)

    def note(self, marks: list[Mark], key: GroupKey | None, nbytes: int, freed: int = 0) -> None:
        """Mark this point for a group, or add to its last mark."""
        if key is None or not (nbytes or freed):
            return
        last = marks[-1] if marks else None
        if last is not None and last.group == key and last.nbytes + nbytes <= SMALL_BYTES:
            last.nbytes += nbytes
            last.freed += freed
            return
        now = self._now()
        if now is not None:
            marks.append(Mark(key, now, nbytes, freed))


def clock_without_waits(laps: Laps) -> Callable[[TimedEvent], float]:
    """When compute would have passed an event, in seconds, had it never waited for copies."""
    took = [wait.begin.elapsed_time(wait.end) / 1e3 for wait in laps.waits]
    ends = [laps.seconds_until(wait.end) for wait in laps.waits]
    waits = sorted(zip(ends, took, strict=True))  # of several threads, in no order
    ends_s = [end_s for end_s, _ in waits]
    waited_s = [0.0, *accumulate(took_s for _, took_s in waits)]

    def seconds_until(event: TimedEvent) -> float:
        at_s = laps.seconds_until(event)
        return at_s - waited_s[bisect.bisect_right(ends_s, at_s)]

    return seconds_until


def rate(laps: Sequence[Lap]) -> float | None:
    """Bytes a second, while copies ran; None if none did, or none took time."""
    took_s = seconds(laps)
    return sum([lap.nbytes for lap in laps]) / took_s if took_s else None
