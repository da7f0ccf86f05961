"""Chooses how much may be in flight and how far reloads run ahead, from steps that it times.

The first complete steps are timed, and after a change of the plan the next ones. Times are read at
the begin of a later step, once all that was timed has ended: nothing waits for them.

    bounds = AutoBounds(offloader, config, room.unused_bytes)
    bounds.begin_step()
    ...
    bounds.end_step(plan, is_complete=True)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import groupby

from pp_offload._common.processes import rank_said
from pp_offload._core.bound import IN_FLIGHT_BYTES, SMALL_BYTES
from pp_offload._core.keys import GroupKey
from pp_offload._core.stopwatch import Laps, seconds
from pp_offload._groups.bounds import (
    Moment,
    Use,
    in_flight_bytes,
    is_wanted,
    planned_bounds,
    window_bytes,
    within,
)
from pp_offload._groups.offloader import Offloader
from pp_offload._groups.plan import Plan
from pp_offload._groups.step_times import Mark, StepTimes, clock_without_waits, rate
from pp_offload.config import OffloadConfig

logger = logging.getLogger(__name__)

NUM_TIMED = 2
"""Steps that are timed: the first one also pays for what a device does once."""

CAUTION = 0.95
"""Copies are taken to be slower than they were."""

GROWN = 1.1
"""With so many times the bytes of the timed step, another one is timed."""

LEAST_IN_FLIGHT_BYTES = IN_FLIGHT_BYTES
"""Less is not chosen: small models have the memory, and with forwards in a row they need it."""

MIB = 2**20


class AutoBounds:
    """Times steps, and chooses.

    Args:
        offloader: Has the cap on bytes in flight, the window, and who watches.
        config: Says what is to be chosen.
        unused_bytes: Of the device, that bounds may grow into; None where there is no end.
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
        self._num_left = NUM_TIMED if is_wanted(config) else 0
        self._plan = Plan()
        self._running: tuple[StepTimes, Laps] | None = None
        self._timed: tuple[StepTimes, Laps] | None = None
        self._sent = self._sent_when_timed = 0

    def begin_step(self) -> None:
        """Choose, if all that was timed has ended; then time this step, if steps are left to time.

        Not in a capture, where nothing can be asked of an event.
        """
        if self._offloader.backend.is_capturing:
            return
        try:
            if self._timed is not None and self._timed[1].are_over():
                timed, self._timed = self._timed, None
                self._num_left -= 1
                self._choose(*timed)
            backend = self._offloader.backend
            laps = Laps.started(backend) if self._num_left and self._timed is None else None
            if laps is not None:
                self._running = StepTimes(partial(laps.now, backend)), laps
                for observer in self._running:
                    self._offloader.observers.add(observer)
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
            for observer in running:
                self._offloader.observers.remove(observer)
            if is_complete and not running[1].is_cut:
                self._timed, self._sent_when_timed = running, sent
        has_grown = is_complete and 0 < self._sent_when_timed * GROWN < sent
        if plan != self._plan or (has_grown and not self._num_left):
            self.follow(plan)

    def follow(self, plan: Plan) -> None:
        """Take the bounds of a plan, or have the next steps timed.

        Planned bounds hold as long as all is as planned, whatever the times: memory stays below the
        limit that the plan was made for.
        """
        self._plan = plan
        self._num_left = NUM_TIMED if is_wanted(self._config) else 0
        if plan.bounds is not None:
            self._take(planned_bounds(self._config, plan.bounds))

    def _choose(self, times: StepTimes, laps: Laps) -> None:
        stalled_s = seconds(laps.waits)
        self._offloader.engine.mover.counts.stalled_ms = stalled_s * 1e3
        if self._plan.bounds is not None:
            return
        least = least_bounds(times, laps, self._plan.kept)
        if least is None:
            return
        self._take(within(self._config, self.now, least, self._unused_bytes()))
        logger.log(
            logging.DEBUG if self._num_left else logging.INFO,
            "%sof a step of %.1f ms compute waited %.1f ms for copies, which take %.1f GB/s to the "
            "host and %.1f back; from now on at most %d MiB wait for their copy, and reloads run "
            "%d MiB ahead",
            rank_said(),
            laps.seconds_until(laps.end) * 1e3,
            stalled_s * 1e3,
            (rate(laps.offloads) or 0) / 1e9,
            (rate(laps.reloads) or 0) / 1e9,
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


def least_bounds(
    times: StepTimes, laps: Laps, kept: Collection[GroupKey]
) -> tuple[int, int] | None:
    """The least bytes in flight, and ahead, at which compute does not wait for copies.

    Args:
        times: When groups left and were used.
        laps: When copies ran, and compute waited.
        kept: Groups that the next steps keep.

    Returns:
        None where nothing was copied one way or the other.
    """
    offload_rate, reload_rate = rate(laps.offloads), rate(laps.reloads)
    if offload_rate is None or reload_rate is None:
        return None
    clock = clock_without_waits(laps)
    caps = [
        in_flight_bytes([Moment(clock(m.at), m.nbytes) for m in marks], offload_rate * CAUTION)
        for marks in _by_chunk(times.offloads, kept)
    ]
    windows = [
        window_bytes([Use(clock(m.at), m.nbytes, m.freed) for m in marks], reload_rate * CAUTION)
        for marks in _by_chunk(times.uses, kept)
    ]
    # small tensors come back in batches of SMALL_BYTES
    return max([LEAST_IN_FLIGHT_BYTES, *caps]), max([SMALL_BYTES, *windows])


def _by_chunk(marks: Iterable[Mark], kept: Collection[GroupKey]) -> Iterable[list[Mark]]:
    """Those of the groups that are not kept; each time a chunk was at work."""
    leaving = (mark for mark in marks if mark.group not in kept)
    return [list(of_chunk) for _, of_chunk in groupby(leaving, key=lambda mark: mark.group.chunk)]
