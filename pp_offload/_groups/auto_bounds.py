"""Measure steps, and choose how much may be in flight and how far reloads run ahead.

The first complete steps are timed, and the next ones after a change of the plan. Times are read at
the begin of a later step, once all timed work has ended: nothing waits for them. The bounds take
the least memory at which compute does not wait for copies. If the link is slower than compute,
compute waits with any bounds, and these keep the link busy.

NOTE [ A chunk at a time ]
    In the steady state of a pipeline every forward is followed by a backward, during which the
    forward's remaining copies to the host can end; and every backward by a forward, during which
    the window is filled. So bounds are computed from a single chunk's bytes. Many forwards in a row
    do not raise them: the link falls behind them with any cap, until all memory is taken.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple
from weakref import WeakSet

from pp_offload._common.processes import logger_of
from pp_offload._core.group import Group, GroupKey, GroupState
from pp_offload._core.in_flight import IN_FLIGHT_BYTES, SMALL_BYTES, refill_below
from pp_offload._core.observers import Lap, Laps, seconds
from pp_offload._core.payloads import Payloads
from pp_offload._core.saved import Saved
from pp_offload._groups.offloader import Offloader
from pp_offload._groups.plan import Plan
from pp_offload._groups.step_line import StepTime
from pp_offload.backends import Backend, TimedEvent
from pp_offload.config import AUTO, OffloadConfig

logger = logger_of(__name__)

NUM_TIMED = 2  # timed steps; the first one includes work that a device does once
CAUTION = 0.95  # factor by which measured rates of copies are reduced
GROWN = 1.1  # a step with 1.1 times the bytes of the timed one is timed anew
# Least cap: small models have the memory, and with forwards in a row they need it.
LEAST_IN_FLIGHT_BYTES = IN_FLIGHT_BYTES
SHARE_OF_UNUSED = 0.8  # of the device, that bounds may grow into: an allocator leaves gaps


class AutoBounds:
    """Measures steps, and chooses ``"auto"`` bounds, which grow by ``unused_bytes`` at most."""

    def __init__(
        self, offloader: Offloader, config: OffloadConfig, unused_bytes: Callable[[], int | None]
    ) -> None:
        self._offloader, self._config, self._unused_bytes = offloader, config, unused_bytes
        self._num_left = NUM_TIMED
        self._plan = Plan()
        self._running: StepTimes | None = None
        self._timed: StepTimes | None = None
        self._ended: StepTimes | None = None  # its copies are over, and bounds chosen from them
        self._begun_s: float | None = None  # by the host's clock, if the device has no timed events
        self._sent = self._sent_when_timed = 0
        # Bytes that a step copies while it computes, in any schedule: to the host in a third of its
        # time, as forwards take, and back in the rest.
        self.hidden_bytes = 0
        self.first = self.last = StepTime()  # of the first and of the last timed step
        self._is_new = False

    def take_settled(self) -> bool:
        """Return, once, whether ``last`` is new and no further step will be timed."""
        is_settled = self._is_new and not self._num_left and self._ended is None
        self._is_new &= not is_settled
        return is_settled

    def begin_step(self) -> None:
        """Choose bounds if the timed step has ended; then time this step, if steps remain to time.
        A capture forbids queries of events, so nothing is done there.
        """
        backend = self._offloader.backend
        if backend.is_capturing:
            return
        try:
            self._note_ended()
            if self._timed is not None and self._timed.are_over():
                self._ended, self._timed = self._timed, None
                self._num_left -= 1
                self._choose(self._ended)
                self._note_ended()
            is_by_host = self.last.step_ms and not self.last.has_waits  # which costs nothing
            if self._timed is None and (self._num_left or is_by_host):
                begin = backend.timed_event(backend.current_stream())
                if begin is None:
                    self._begun_s = time.perf_counter()
                else:
                    self._running = StepTimes(begin, backend)
                    self._offloader.observers.add(self._running)
        except RuntimeError as failure:  # events of this device, or of another stream, have no time
            self._timed = self._ended = None
            self._num_left = max(0, self._num_left - 1)
            logger.debug("bounds do not change, because a step was not timed: %s", str(failure))
        self._sent = self._offloader.engine.mover.counts.bytes_offloaded

    def end_step(self, plan: Plan, *, is_complete: bool) -> None:
        """End the step, which is typical of others if it ``is_complete``. A new ``plan`` for the
        next steps, or a step with more bytes than the timed one, has the next steps timed again.
        """
        running, self._running = self._running, None
        begun_s, self._begun_s = self._begun_s, None
        sent = self._offloader.engine.mover.counts.bytes_offloaded - self._sent
        if running is not None:
            self._offloader.observers.remove(running)
            if is_complete and running.end_step():
                self._timed, self._sent_when_timed = running, sent
        elif begun_s is not None and is_complete:
            self._note(StepTime((time.perf_counter() - begun_s) * 1e3))
            self._is_new |= self._num_left > 0
            self._num_left = max(0, self._num_left - 1)
        has_grown = is_complete and 0 < self._sent_when_timed * GROWN < sent
        if plan != self._plan or (has_grown and not self._num_left):
            self.follow(plan)
            if begun_s is not None:
                self._num_left = 1  # nothing is chosen from the host's times

    def follow(self, plan: Plan) -> None:
        """Take the bounds of a plan, or have the next steps timed. Planned bounds hold while groups
        are as planned, for any times: memory stays below the limit of the plan.
        """
        self._plan, self._is_new, self._num_left = plan, False, NUM_TIMED
        if plan.bounds is not None:
            self._take(*plan.bounds)

    def _note(self, step: StepTime) -> None:
        if not self.first.step_ms:
            self.first = step
        self.last = step
        self._offloader.engine.mover.counts.step_ms = step.step_ms

    def _note_ended(self) -> None:
        """Note the time of a step whose copies were over before, once its end has passed."""
        ended = self._ended
        if ended is not None and ended.step_end.query():
            self._ended = None
            step_s, stalled_s = ended.seconds_until(ended.step_end), seconds(ended.waits)
            self._note(StepTime(step_s * 1e3, stalled_s * 1e3, has_waits=True))
            self._is_new = True

    def _choose(self, times: StepTimes) -> None:
        stalled_s, step_s = seconds(times.waits), times.seconds_until(times.end)
        self._offloader.engine.mover.counts.stalled_ms = stalled_s * 1e3
        to_host, back = rate(times.offloads), rate(times.reloads)
        if not (to_host and back):
            return
        forward_s = (step_s - stalled_s) / 3
        self.hidden_bytes = int(min(to_host, 2 * back) * forward_s * CAUTION)
        options = (self._config.max_in_flight_bytes, self._config.prefetch_bytes)
        # With a disk, the times of copies do not suffice.
        if self._plan.bounds is None and AUTO in options and self._config.tiers == ("host",):
            least = least_bounds(times, self._plan.staying)
            least = [nbytes * (given == AUTO) for nbytes, given in zip(least, options, strict=True)]
            cap_bytes, ahead_bytes = _within(self._unused_bytes(), self.now, least)
            self._take(max(1, cap_bytes), ahead_bytes)  # with 0 compute would wait for each copy

    def _take(self, cap_bytes: int, ahead_bytes: int) -> None:
        self._offloader.engine.mover.in_flight.bound.choose(cap_bytes)
        self._offloader.engine.window.bound.choose(ahead_bytes)

    @property
    def now(self) -> tuple[int, int]:
        """Current bounds: on bytes in flight, and on bytes reloaded ahead."""
        engine = self._offloader.engine
        return engine.mover.in_flight.bound.nbytes, engine.window.bound.nbytes


# Times of a step


@dataclass(slots=True)
class Mark:
    """A point of compute's time at which a group was offloaded, or its payloads were used."""

    group: GroupKey
    at: TimedEvent
    nbytes: int
    freed: int = 0  # bytes that are used for the last time


class StepTimes(Laps):
    """Laps of a step that also mark when groups leave, and when reloaded payloads are used."""

    def __init__(self, begin: TimedEvent, backend: Backend) -> None:
        super().__init__(begin)
        self.sent: list[Mark] = []
        self.uses: list[Mark] = []
        self._backend = backend
        self._closed = WeakSet[Group]()
        self._reached: GroupKey | None = None
        self.step_end = begin

    def end_step(self) -> bool:
        """Note the end of the step, which is behind the last mark. Return whether all was timed."""
        last_mark = self.end
        self.step_end = self.now(self._backend) or last_mark
        self.end = last_mark
        return not self.is_cut

    def closed(self, group: Group, payloads: Payloads | None) -> None:
        self._closed.add(group)
        if group.state is GroupState.OFFLOADED:
            self._mark(self.sent, group.key, group.counts.copied_bytes)

    def reached(self, group: Group) -> None:
        self._reached = group.key

    def used(self, saved: Saved, payload: object) -> None:
        """Mark the first and last use of a payload that a copy reloaded; others need no window."""
        batch, index = saved.batch, saved.index
        reload = batch.back.reloads[index]
        if reload is None or reload.event is None or saved.group not in self._closed:
            return  # also for a group of an earlier step
        nbytes, uses_left = batch.sizes[index], batch.back.uses_left[index]
        is_first, is_last = uses_left >= batch.back.uses[index] - 1, uses_left <= 0
        self._mark(self.uses, self._reached, nbytes * is_first, nbytes * is_last)

    def _mark(self, marks: list[Mark], key: GroupKey | None, nbytes: int, freed: int = 0) -> None:
        """Mark this point for a group, or add to its last mark."""
        if key is None or not (nbytes or freed):
            return
        if marks and marks[-1].group == key and marks[-1].nbytes + nbytes <= SMALL_BYTES:
            marks[-1].nbytes += nbytes
            marks[-1].freed += freed
        elif (now := self.now(self._backend)) is not None:
            marks.append(Mark(key, now, nbytes, freed))


def rate(laps: Sequence[Lap]) -> float:
    """Return bytes a second while copies ran; 0 if no copy took time."""
    took_s = seconds(laps)
    return sum([lap.nbytes for lap in laps]) / took_s if took_s else 0.0


def least_bounds(times: StepTimes, staying: Collection[GroupKey]) -> Sequence[int]:
    """Return the least bytes in flight, and ahead, at which compute does not wait for copies, if
    ``staying`` groups stay. The step had copies to the host, and copies back.
    """
    clock = clock_without_waits(times)

    def by_chunk(marks: Iterable[Mark]) -> Iterable[list[TimedBytes]]:
        leaving = (mark for mark in marks if mark.group not in staying)
        for _, of_chunk in groupby(leaving, key=lambda mark: mark.group.chunk):
            yield [TimedBytes(clock(mark.at), mark.nbytes, mark.freed) for mark in of_chunk]

    offload_rate, reload_rate = rate(times.offloads) * CAUTION, rate(times.reloads) * CAUTION
    caps = [in_flight_bytes(chunk, offload_rate) for chunk in by_chunk(times.sent)]
    windows = [window_bytes(chunk, reload_rate) for chunk in by_chunk(times.uses)]
    # small tensors come back in batches of SMALL_BYTES
    return max([LEAST_IN_FLIGHT_BYTES, *caps]), max([SMALL_BYTES, *windows])


def clock_without_waits(laps: Laps) -> Callable[[TimedEvent], float]:
    """Return a function: seconds until an event, if compute had never waited for copies."""
    # sorted: several threads wait, in no order
    waits = sorted((laps.seconds_until(wait.end), seconds([wait])) for wait in laps.waits)
    ends_s = [end_s for end_s, _ in waits]
    waited_s = [0.0, *accumulate(took_s for _, took_s in waits)]

    def seconds_until(event: TimedEvent) -> float:
        at_s = laps.seconds_until(event)
        return at_s - waited_s[bisect.bisect_right(ends_s, at_s)]

    return seconds_until


# The least bounds: pure functions of times in which nothing waits


class TimedBytes(NamedTuple):
    """Time at which compute had made ``nbytes`` that leave; or had used ``nbytes`` that came back
    for the first time, and ``freed`` for the last time: several saved tensors may share bytes.
    """

    at_s: float
    nbytes: int
    freed: int = 0


def in_flight_bytes(offloads: Sequence[TimedBytes], bytes_per_s: float) -> int:
    """Return the most bytes in flight in a chunk's forward without waits, newest group included."""
    under_way: deque[TimedBytes] = deque()
    now = most = 0
    free_s = 0.0
    for at_s, nbytes, _ in offloads:
        while under_way and under_way[0].at_s <= at_s:
            now -= under_way.popleft().nbytes
        now += nbytes
        most = max(most, now)
        free_s = max(free_s, at_s) + nbytes / bytes_per_s
        under_way.append(TimedBytes(free_s, nbytes))
    return most


def window_bytes(uses: Sequence[TimedBytes], bytes_per_s: float) -> int:
    """Return the smallest window, to 1/64 of all bytes, that is full at first and always ahead."""
    low, high = 0, sum([use.nbytes for use in uses])
    step = max(1, high // 64)
    while high - low > step:
        middle = (low + high) // 2
        if is_in_time(uses, middle, bytes_per_s):
            high = middle
        else:
            low = middle
    return high


def is_in_time(uses: Sequence[TimedBytes], window: int, bytes_per_s: float) -> bool:
    """Whether no use waits if reloads run ahead by ``window`` bytes, as in a :class:`Window`."""
    sizes = [use.nbytes for use in uses if use.nbytes]
    there_s: list[float] = []
    num_used = unused = 0
    free_s = asked_at_s = float("-inf")
    for at_s, nbytes, freed in uses:
        if not there_s or unused <= refill_below(window):
            for more in sizes[len(there_s) :]:
                if unused and unused + more > window:
                    break
                free_s = max(free_s, asked_at_s) + more / bytes_per_s
                there_s.append(free_s)
                unused += more
        if nbytes:
            if num_used >= len(there_s) or there_s[num_used] > at_s:
                return False
            num_used += 1
        unused -= freed
        asked_at_s = at_s
    return True


def _within(unused_bytes: int | None, now: Sequence[int], wanted: Sequence[int]) -> Sequence[int]:
    """Return the new bounds, which together grow into a part of the unused bytes at most. A bound
    that shrinks makes no room for another: the two need not be full at the same time.
    """
    more = [max(0, new - old) for old, new in zip(now, wanted, strict=True)]
    room = sum(more) if unused_bytes is None else int(unused_bytes * SHARE_OF_UNUSED)
    if sum(more) <= room:
        return wanted
    shares = [nbytes * room // sum(more) for nbytes in more]
    return [min(new, old + add) for old, new, add in zip(now, wanted, shares, strict=True)]
