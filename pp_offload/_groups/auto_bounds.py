"""Chooses how much may be in flight and how far reloads run ahead, from the times of steps.

    bounds = AutoBounds(offloader, config, room.unused_bytes)
    bounds.begin_step()
    ...
    bounds.end_step(plan, is_complete=True)

The first complete steps are timed, and after a change of the plan the next ones. Times are read at
the begin of a later step, once all that was timed has ended: nothing waits for them.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from pp_offload._common.processes import logger_of
from pp_offload._core.bound import IN_FLIGHT_BYTES, SMALL_BYTES
from pp_offload._core.group import Group, GroupState
from pp_offload._core.keys import GroupKey
from pp_offload._core.observer import Lap
from pp_offload._core.payloads import Payloads
from pp_offload._core.saved import Saved
from pp_offload._core.stopwatch import Laps, seconds
from pp_offload._groups.bounds import (
    TimedBytes,
    in_flight_bytes,
    is_wanted,
    window_bytes,
    within,
)
from pp_offload._groups.offloader import Offloader
from pp_offload._groups.plan import Plan
from pp_offload._groups.step_line import StepTime
from pp_offload.backends import Backend, TimedEvent
from pp_offload.config import OffloadConfig

logger = logger_of(__name__)

NUM_TIMED = 2
"""Steps that are timed: the first one also pays for what a device does once."""

CAUTION = 0.95
"""Copies are taken to be slower than they were."""

GROWN = 1.1
"""With so many times the bytes of the timed step, another one is timed."""

LEAST_IN_FLIGHT_BYTES = IN_FLIGHT_BYTES
"""Less is not chosen: small models have the memory, and with forwards in a row they need it."""

MIB = 2**20


@dataclass(slots=True)
class Mark:
    """A point of compute's time at which a group was offloaded, or some of it was used."""

    group: GroupKey
    at: TimedEvent
    nbytes: int
    freed: int = 0
    """Of what is used for the last time."""


class StepTimes(Laps):
    """Also marks when groups leave, and when what came back is used.

    Args:
        begin: The times count from here.
        backend: Gives an event on the live compute stream; None where nothing can be timed.

    Attributes:
        sent: When groups left, in order.
        uses: In order; small ones that follow each other are added up.
    """

    def __init__(self, begin: TimedEvent, backend: Backend) -> None:
        super().__init__(begin)
        self.sent: list[Mark] = []
        self.uses: list[Mark] = []
        self._backend = backend
        self._reached: GroupKey | None = None

    def closed(self, group: Group, payloads: Payloads | None) -> None:
        if group.state is GroupState.OFFLOADED:
            self._mark(self.sent, group.key, group.counts.copied_bytes)

    def reached(self, group: Group) -> None:
        self._reached = group.key

    def used(self, saved: Saved, payload: object) -> None:
        """A first use, unless it came by no copy: then there is nothing to be ahead of."""
        batch, index = saved.batch, saved.index
        reload = batch.back.reloads[index]
        if reload is None or reload.event is None:
            return
        nbytes, uses_left = batch.sizes[index], batch.back.left[index]
        is_first, is_last = uses_left >= batch.back.uses[index] - 1, uses_left <= 0
        self._mark(self.uses, self._reached, nbytes * is_first, nbytes * is_last)

    def _mark(self, marks: list[Mark], key: GroupKey | None, nbytes: int, freed: int = 0) -> None:
        """Mark this point for a group, or add to its last mark."""
        if key is None or not (nbytes or freed):
            return
        last = marks[-1] if marks else None
        if last is not None and last.group == key and last.nbytes + nbytes <= SMALL_BYTES:
            last.nbytes += nbytes
            last.freed += freed
            return
        now = self.now(self._backend)
        if now is not None:
            marks.append(Mark(key, now, nbytes, freed))


class AutoBounds:
    """Times steps, and chooses.

    Args:
        offloader: Has the cap on bytes in flight, the window, and who watches.
        config: Says what is to be chosen.
        unused_bytes: Of the device, that bounds may grow into; None where there is no end.

    Attributes:
        hidden_bytes: Copies of a step that hide behind its compute, whatever the schedule: those
            to the host in a third of its time, as forwards take, and those back in the rest.
    """

    def __init__(
        self,
        offloader: Offloader,
        config: OffloadConfig,
        unused_bytes: Callable[[], int | None],
    ) -> None:
        self._offloader = offloader
        self._config = config
        self._unused_bytes = unused_bytes
        self._num_left = NUM_TIMED
        self._plan = Plan()
        self._running: StepTimes | None = None
        self._timed: StepTimes | None = None
        self._sent = self._sent_when_timed = 0
        self.hidden_bytes = 0
        self._settled: StepTime | None = None

    def take_settled(self) -> StepTime | None:
        """The last step that was timed, once, when no more are to be timed."""
        settled, self._settled = self._settled, None
        return settled

    def begin_step(self) -> None:
        """Choose, if all that was timed has ended; then time this step, if steps are left to time.

        Not in a capture, where nothing can be asked of an event.
        """
        backend = self._offloader.backend
        if backend.is_capturing:
            return
        try:
            if self._timed is not None and self._timed.are_over():
                timed, self._timed = self._timed, None
                self._num_left -= 1
                self._choose(timed)
            if self._num_left and self._timed is None:
                begin = backend.timed_event(backend.current_stream())
                if begin is not None:  # the device has a clock
                    self._running = StepTimes(begin, backend)
                    self._offloader.observers.add(self._running)
        except RuntimeError as failure:  # events of this device, or of another stream, have no time
            self._timed = None
            self._num_left = max(0, self._num_left - 1)
            logger.debug("the bounds stay as they are, for a step was not timed: %s", str(failure))
        self._sent = self._offloader.engine.mover.counts.bytes_offloaded

    def end_step(self, plan: Plan, *, is_complete: bool) -> None:
        """The step is over.

        Args:
            plan: For the steps to come. After a change of it steps are timed again, as where more
                bytes leave than in the timed step.
            is_complete: Whether the step says what others will be like.
        """
        running, self._running = self._running, None
        sent = self._offloader.engine.mover.counts.bytes_offloaded - self._sent
        if running is not None:
            self._offloader.observers.remove(running)
            if is_complete and not running.is_cut:
                self._timed, self._sent_when_timed = running, sent
        has_grown = is_complete and 0 < self._sent_when_timed * GROWN < sent
        if plan != self._plan or (has_grown and not self._num_left):
            self.follow(plan)

    def follow(self, plan: Plan) -> None:
        """Take the bounds of a plan, or have the next steps timed.

        Planned bounds hold as long as all is as planned, whatever the times: memory stays below the
        limit that the plan was made for.
        """
        self._plan, self._settled = plan, None
        self._num_left = NUM_TIMED
        if plan.bounds is not None:
            self._take(plan.bounds)

    def _choose(self, times: StepTimes) -> None:
        stalled_s = seconds(times.waits)
        to_host, back = rate(times.offloads), rate(times.reloads)
        step_s = times.seconds_until(times.end)
        if not self._num_left:
            self._settled = StepTime(step_s * 1e3, stalled_s * 1e3)
        if to_host is not None and back is not None:
            forward_s = (step_s - stalled_s) / 3
            self.hidden_bytes = int(min(to_host, 2 * back) * forward_s * CAUTION)
        self._offloader.engine.mover.counts.stalled_ms = stalled_s * 1e3
        if self._plan.bounds is not None or not is_wanted(self._config):
            return
        least = least_bounds(times, self._plan.kept)
        if least is None:
            return
        self._take(within(self._config, self.now, least, self._unused_bytes()))
        logger.debug(
            "in a step of %.1f ms compute waited %.1f ms for copies, which take %.1f GB/s to the "
            "host and %.1f back; from now on at most %d MiB wait for their copy, and reloads run "
            "%d MiB ahead",
            step_s * 1e3,
            stalled_s * 1e3,
            (to_host or 0) / 1e9,
            (back or 0) / 1e9,
            *(nbytes // MIB for nbytes in self.now),
        )

    def _take(self, bounds: tuple[int, int]) -> None:
        cap_bytes, ahead_bytes = bounds
        self._offloader.engine.mover.in_flight.bound.choose(cap_bytes)
        self._offloader.engine.window.choose(ahead_bytes)

    @property
    def now(self) -> tuple[int, int]:
        """The bounds as they are: on bytes in flight, and on what is ahead."""
        return (
            self._offloader.engine.mover.in_flight.bound.nbytes,
            self._offloader.engine.window.bound.nbytes,
        )


def least_bounds(times: StepTimes, staying: Collection[GroupKey]) -> tuple[int, int] | None:
    """The least bytes in flight, and ahead, at which compute does not wait for copies.

    Args:
        times: Of a step.
        staying: Groups that the next steps keep.

    Returns:
        None where nothing was copied one way or the other.
    """
    offload_rate, reload_rate = rate(times.offloads), rate(times.reloads)
    if offload_rate is None or reload_rate is None:
        return None
    caps = [
        in_flight_bytes(sent, offload_rate * CAUTION)
        for sent in _by_chunk(times, times.sent, staying)
    ]
    windows = [
        window_bytes(uses, reload_rate * CAUTION) for uses in _by_chunk(times, times.uses, staying)
    ]
    # small tensors come back in batches of SMALL_BYTES
    return max([LEAST_IN_FLIGHT_BYTES, *caps]), max([SMALL_BYTES, *windows])


def _by_chunk(
    times: StepTimes, marks: Iterable[Mark], staying: Collection[GroupKey]
) -> Iterable[list[TimedBytes]]:
    """What leaves, by compute's time without waits: a list for each time a chunk was at work."""
    clock = clock_without_waits(times)
    leaving = (mark for mark in marks if mark.group not in staying)
    for _, of_chunk in groupby(leaving, key=lambda mark: mark.group.chunk):
        yield [TimedBytes(clock(mark.at), mark.nbytes, mark.freed) for mark in of_chunk]


def clock_without_waits(laps: Laps) -> Callable[[TimedEvent], float]:
    """When compute would have passed an event, in seconds, if it had never waited for copies."""
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
