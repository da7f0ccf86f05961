"""Choose which groups stay below a limit of device memory, from the memory that steps take.

    room = DeviceRoom(offloader)
    room.begin_step(config.limit)
    ...
    room.end_step(step.shapes(), bounds.hidden_bytes)
    room.stay  # for the next plan

At first all groups leave. The second step measures the memory that the device needs even if all
leave. If all groups fit beside it, all stay. Else bounds on copies in flight are chosen first, and
two steps later groups fill the room below the limit beside these bounds.

NOTE [ The first step ]
    An optimizer makes its state after the first step. So the first step only shows the sizes of its
    groups, and so does a step that needs more memory than any before.

NOTE [ Room follows the steps ]
    Memory in use when a step begins may grow, and another process may take memory of the device. So
    the room is computed after each step. If a step took more than the limit, the excess is also
    reserved from then on. After two equal smaller steps the larger ones are forgotten, and the room
    is filled for the smaller; if a larger step comes back, twice as many are needed next time.

NOTE [ Needed bytes ]
    The memory that a step needs even if all groups leave is read when a backward goes on to another
    chunk: bytes allocated, less bytes of copies in flight and of groups that stay, which can be
    counted at that time. The height of the step's peak above these readings is added, such as the
    memory of a loss's backward. As many bytes may be in flight as the bounds allow, even if this
    step had fewer: the less leaves, the sooner it comes back.

NOTE [ Peaks of the device ]
    A device reports its peak since the last reset, and only the user resets it. This peak may come
    from another program, from loading a checkpoint, or from an evaluation after the last backward,
    outside of groups: only a peak that rose where groups begin, end and are reached is a step's.
    So the allocated bytes are also read at these times, and, as long as no peak rose, the bytes of
    the largest group stay free for memory that is allocated and freed in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from pp_offload._common.processes import logger_of, warn_once
from pp_offload._common.text import MIB, size_text
from pp_offload._core.group import ChunkKey, Group, Place
from pp_offload._core.observers import Observer
from pp_offload._core.payloads import Payloads
from pp_offload._groups.offloader import Offloader
from pp_offload._groups.plan import ChunkShape, ChunksInFlight, Stay, groups_sum
from pp_offload._groups.step_line import DeviceFigures, Gain, StepTime
from pp_offload._groups.which_stay import Beside, Change, Demand, History, by_stage, covers, fitting
from pp_offload.backends import Allocated
from pp_offload.config import AUTO

logger = logger_of(__name__)

NUM_SETTLING = 3  # steps after the first, in which bounds are chosen: see auto_bounds.NUM_TIMED
# 1/32 of the limit stays free for growth, 2/32 if the allocator had to give memory back; room is
# refilled when it grew by 1/32.
PART = 32


def at_rest_bytes(offloader: Offloader, now: Allocated) -> int:
    """Return the allocated bytes without copies in flight, both ways."""
    mover = offloader.engine.mover
    return now.nbytes - mover.in_flight.nbytes - mover.arrived.unused_bytes


class StepMemory(Observer):
    """Observes the memory of a step; at each event of a group, if it ``reads_always``. Where more
    chunks are in flight than in ``moments``, which have room, groups that stay leave.
    """

    def __init__(
        self,
        offloader: Offloader,
        begin: Allocated,
        moments: frozenset[ChunksInFlight] | None,
        reads_always: bool,
    ) -> None:
        self._offloader, self._begin = offloader, begin
        self._moments, self._reads_always = moments, reads_always
        self.begin_bytes = at_rest_bytes(offloader, begin)
        # Peak that the device had reported when the first group opened, and has reported since.
        self.outside_bytes = self.reported_bytes = begin.peak_bytes
        self.peak_bytes = 0  # of the step: the highest reading, or the device's peak if that rose
        # Whether the device's own peak rose in the step; if so, whether last after the last group
        # of a forward, before its backward; and whether the allocator gave memory back.
        self.has_risen = self.is_of_loss = self.had_retries = False
        self.chunks_in_flight: set[ChunksInFlight] = set()  # each time that a forward began
        self.beside: dict[Place, Beside] = {}
        self._num_retries = begin.num_retries
        # Most allocated bytes when a backward went on to another chunk; and most of these without
        # copies, by chunks in flight.
        self.allocated_bytes, self.besides_copies = 0, Counter[ChunksInFlight]()
        self._begun: set[ChunkKey] = set()
        self._in_backward: ChunkKey | None = None
        self._is_behind_forward = False

    def now(self) -> Allocated:
        return self._offloader.backend.allocated() or self._begin

    def opened(self, group: Group) -> None:
        """Note the chunks in flight, if the group is the first of its chunk."""
        if group.key is not None and group.key.chunk not in self._begun:
            if not self._begun:  # a peak that rose before belongs to no step
                now = self.now()
                self.outside_bytes = max(self.outside_bytes, now.peak_bytes)
                self.reported_bytes, self._num_retries = now.peak_bytes, now.num_retries
            self._begun.add(group.key.chunk)
            in_flight = self._offloader.step.in_flight()
            self.chunks_in_flight.add(in_flight)
            if self._moments is not None and not covers(self._moments, in_flight):
                plan = self._offloader.plan
                self._offloader.plan = replace(plan, stay=dict.fromkeys(plan.stay, 0))
        self._read()
        self._is_behind_forward = False

    def closed(self, group: Group, payloads: Payloads | None) -> None:
        """Note bytes beside the payloads: a group that stays holds storages whole."""
        self._read()
        self._is_behind_forward = True
        if group.key is not None and payloads is not None:
            again_bytes, place = group.counts.recipe_bytes, group.key.place
            now = payloads.beside_bytes - again_bytes, again_bytes
            self.beside[place] = Beside(*map(max, self.beside.get(place, Beside()), now))

    def reached(self, group: Group) -> None:
        """Read memory; for a new chunk, see NOTE [ Needed bytes ]."""
        if group.key is None or group.key.chunk == self._in_backward:
            self._read()
            return
        now, chunks = self.now(), self._offloader.step.in_flight()
        self._note(now, is_of_loss=self._is_behind_forward)
        self._in_backward, self._is_behind_forward = group.key.chunk, False
        self.allocated_bytes = max(self.allocated_bytes, now.nbytes)
        nbytes = at_rest_bytes(self._offloader, now)
        self.besides_copies[chunks] = max(self.besides_copies[chunks], nbytes)

    def _read(self) -> None:
        if self._reads_always:
            self._note(self.now())

    def _note(self, now: Allocated, *, is_of_loss: bool = False) -> None:
        if now.peak_bytes > self.reported_bytes:
            self.reported_bytes = self.peak_bytes = now.peak_bytes
            self.has_risen, self.is_of_loss = True, is_of_loss
        self.peak_bytes = max(self.peak_bytes, now.nbytes)
        self.had_retries = now.num_retries > self._num_retries


class DeviceRoom:
    """Measures steps, and fills the room below the limit."""

    def __init__(self, offloader: Offloader) -> None:
        self._offloader = offloader
        self._limit: int | str | None = None
        self._stay: dict[Place, int] = {}
        self._history = History()
        self._num_left = NUM_SETTLING
        self._above_bytes = 0  # height of the peak above readings at changes of the chunk
        self._needed_bytes = 0  # needed if all leave, above the bytes at the begin of the step
        self._spare_bytes = 0  # reserved, because steps took more than foreseen
        self._room_bytes = -1  # room at the last fill
        self._foreseen_bytes: int | None = None
        self._reported_bytes = 0  # peak that the device reported after the last step
        self._outside_bytes = 0  # peak that the device reported, if it rose between two steps
        self._risen_bytes = 0  # peak of the last step in which the reported peak rose
        self._is_of_loss = False  # whether that peak was after the last group of a forward
        self._figures: DeviceFigures | None = None
        self._seen: StepMemory | None = None

    def gain(self, now: StepTime, first: StepTime) -> Gain:
        """Return the cost and gain of the last step, given the times of steps."""
        groups = groups_sum(self._offloader.step.summary.values())
        return Gain(now, first, groups, self._figures, self._offloader.copies_free)

    @property
    def is_watching(self) -> bool:
        """Whether there is a limit, on a device that reports what is allocated."""
        return self._seen is not None and self._limit is not None

    @property
    def is_settled(self) -> bool:
        """Whether the groups that stay have been chosen, or no limit is set."""
        return not (self.is_watching and self._num_left)

    @property
    def stay(self) -> Stay:
        sizes, lean = self._history.demand.sizes, self._history.demand.lean
        return frozenset((at, lean[at], nbytes < sizes[at]) for at, nbytes in self._stay.items())

    def begin_step(self, limit: int | str | None) -> None:
        """Begin to measure a step; without a limit only its peak, and no group stays."""
        backend, self._limit = self._offloader.backend, limit
        if limit is None:
            self._stay, self._foreseen_bytes = {}, None
            self._num_left, self._room_bytes = max(1, self._num_left), -1
        if backend.is_capturing or (limit == AUTO and backend.memory_bytes() is None):
            return
        allocated = backend.allocated()
        if allocated is None:
            if isinstance(limit, int):
                warn_once(
                    logger,
                    self,
                    "device_limit_bytes is given, but %s does not report allocated bytes: all "
                    "groups leave; give a plan that was made before, or omit the option",
                    backend.name,
                )
            return
        needed_less = self._history.last != self._history.demand
        reads_always = limit is not None and (self._num_left > 0 or needed_less)
        moments = self._history.demand.in_flight if self._stay else None
        self._seen = seen = StepMemory(self._offloader, allocated, moments, reads_always)
        self._offloader.observers.add(seen)

    def end_step(self, chunks: Sequence[ChunkShape] | None, hidden_bytes: int = 0) -> None:
        """End the step, and choose which groups stay; not if ``chunks`` is None, as after a step
        that is not typical.
        """
        seen = self._seen
        if seen is None:
            return
        self._offloader.observers.remove(seen)  # first: after an interrupt, it is removed again
        self._seen = None
        if seen.outside_bytes > self._reported_bytes:
            self._outside_bytes = seen.outside_bytes
        self._reported_bytes = seen.reported_bytes
        if not chunks:
            if self._stay:  # it was above the limit in a step that is not typical
                self._spare_bytes += max(0, seen.peak_bytes - min(self._limits()))
            return
        if self._limit is None:
            self._note_figures(self._peak_of(seen))
            return
        step = Demand.of(chunks, seen.beside, seen.chunks_in_flight)
        staying = by_stage(  # bytes of groups that stay in a chunk of this step
            {at: (step.lean if is_lean else step.sizes).get(at, 0) for at, _, is_lean in self.stay}
        )
        peak_bytes = max(seen.peak_bytes, seen.allocated_bytes + self._above_bytes)
        change = self._history.add(step)
        if change is not Change.NONE:
            self._forget(change)
        if change is not Change.MORE and (self._num_left or change is Change.LESS):
            self._num_left = max(0, self._num_left - 1)
            self._foreseen_bytes = peak_bytes = self._measure(seen, staying)
        limit_bytes = min(self._limits())
        self._note_figures(peak_bytes, limit_bytes, self._elsewhere(peak_bytes))
        if self._stay:
            self._spare_bytes += max(0, peak_bytes - limit_bytes)
            self._spare_bytes += seen.had_retries * limit_bytes // PART
        if self._foreseen_bytes is not None:
            now_bytes = at_rest_bytes(self._offloader, seen.now())
            needed_bytes = now_bytes + self._needed_bytes + self._spare_bytes
            self._fill(needed_bytes, limit_bytes, hidden_bytes)
        if peak_bytes > limit_bytes and not self._stay and not self._num_left:
            warn_once(
                logger,
                self,
                "the device took %d bytes, expected at most device_limit_bytes, which is %d: all "
                "groups leave; lower max_in_flight_bytes and prefetch_bytes, which allow %.1f MiB "
                "in flight; have more of the model in groups, recompute layers, or make "
                "microbatches shorter",
                *(peak_bytes, limit_bytes, self._moving_bytes() / MIB),
            )

    def _note_figures(self, peak_bytes: int, limit_bytes: int | None = None, why: str = "") -> None:
        first_bytes = peak_bytes if self._figures is None else self._figures.first_peak_bytes
        is_given = self._limit != AUTO
        self._figures = DeviceFigures(peak_bytes, first_bytes, limit_bytes, why, is_given)

    def _forget(self, change: Change) -> None:
        """Forget the choice for another demand. After a larger step all groups leave."""
        self._stay, self._room_bytes, self._risen_bytes = {}, -1, 0
        if change is Change.MORE:
            self._num_left = NUM_SETTLING if self._num_left else 1
            self._foreseen_bytes = None
        else:
            self._needed_bytes = self._spare_bytes = 0

    def _measure(self, seen: StepMemory, staying: Counter[int]) -> int:
        """Return the peak of a measured step; also note the bytes needed if all groups leave."""
        peak_bytes = self._peak_of(seen)
        if not self._risen_bytes:  # see NOTE [ Peaks of the device ]
            peak_bytes += max(self._history.demand.sizes.values(), default=0)
        self._above_bytes = max(0, peak_bytes - seen.allocated_bytes)
        fixed_bytes = [
            nbytes - sum([num * staying[stage] for stage, num in chunks])  # without what stays
            for chunks, nbytes in seen.besides_copies.items()
        ]
        needed_bytes = max(fixed_bytes, default=0) + self._above_bytes - seen.begin_bytes
        self._needed_bytes = max(self._needed_bytes, needed_bytes)
        return peak_bytes

    def _peak_of(self, seen: StepMemory) -> int:
        if seen.has_risen:
            self._risen_bytes, self._is_of_loss = seen.peak_bytes, seen.is_of_loss
        return max(seen.peak_bytes, self._risen_bytes)

    def _elsewhere(self, peak_bytes: int) -> str:
        """Return the cause of the device's peak as text; empty if the peak is in a group."""
        if self._outside_bytes > peak_bytes:
            return (
                f"the most, {size_text(self._outside_bytes)}, is taken outside of groups, by "
                "an optimizer, an evaluation, or loading"
            )
        if self._is_of_loss:
            return "that is behind the last group's forward: the model's head, or its loss"
        return ""

    def _fill(self, needed_bytes: int, limit_bytes: int, hidden_bytes: int) -> None:
        """Choose which groups stay beside ``needed_bytes``, and again when the room changed."""
        demand, moving_bytes = self._history.demand, self._moving_bytes()
        room_bytes = limit_bytes - limit_bytes // PART - needed_bytes
        all_bytes = demand.nbytes(demand.sizes)
        if self._num_left and all_bytes > room_bytes:
            return  # bounds are not chosen yet
        self._num_left = 0
        stay_bytes = demand.nbytes(self._stay)
        most_bytes = stay_bytes + moving_bytes * (len(self._stay) < len(demand.sizes))
        has_less = stay_bytes > 0 and most_bytes > room_bytes
        has_more = stay_bytes < all_bytes and room_bytes > self._room_bytes + limit_bytes // PART
        if has_less or has_more:
            self._room_bytes = room_bytes
            self._stay = fitting(demand, room_bytes, moving_bytes, hidden_bytes)
            if len(self._stay) < len(demand.sizes):  # outputs may hold these into the next step
                for place in self._offloader.step.unused & self._stay.keys():
                    del self._stay[place]
            stay_bytes = demand.nbytes(self._stay)
            logger.debug(
                "%d of %d groups of a microbatch stay from now on, %.1f MiB at most; the device "
                "needs %.1f MiB besides, and up to %.1f for copies in flight while groups leave; "
                "the limit is %.1f MiB",
                *(len(self._stay), len(demand.sizes)),
                *(num / MIB for num in (stay_bytes, needed_bytes, moving_bytes, limit_bytes)),
            )
        self._foreseen_bytes = needed_bytes + stay_bytes + moving_bytes

    def _moving_bytes(self) -> int:
        """Return the most bytes in flight, both ways together. A bound cuts no group."""
        largest = max(self._history.demand.lean.values(), default=0)
        engine = self._offloader.engine
        bounds = engine.mover.in_flight.bound.nbytes, engine.window.bound.nbytes
        return sum(max(bound, largest) for bound in bounds)

    def _limits(self) -> list[int]:
        """Return the limit, and the memory of the device, if known."""
        limits = self._limit, self._offloader.backend.memory_bytes()
        return [nbytes for nbytes in limits if isinstance(nbytes, int)]

    def unused_bytes(self) -> int | None:
        """Return the unused bytes that bounds may grow into; None without a limit."""
        allocated, limits = self._offloader.backend.allocated(), self._limits()
        if allocated is None or not limits:
            return None
        taken_bytes = self._foreseen_bytes
        if taken_bytes is None:
            taken_bytes = max(allocated.peak_bytes, allocated.reserved_bytes)
        return max(0, min(limits) - taken_bytes)
