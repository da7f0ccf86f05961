"""Which groups each rank keeps, so that no device's peak is above a limit and a step is short.

    plan = choose(order, tapes, DEVICES["H100"], 40 * 2**30)
    plan.save("plan.json")

Offload costs nothing until compute waits for copies, and never helps a step. So each rank keeps as
much as the limit lets it, and sends away what a forward saves first, which is needed last.
Ranks differ, for the first of a pipeline has the most microbatches in flight.

NOTE [ What is proven ]
    The step without offload is a lower bound of all plans. Each rank has its operators in the same
    order whatever leaves; a plan adds waits, and a wait never makes anything begin earlier. That
    the peak is below the limit is not reckoned, but played. That no plan of another kind is faster
    where ours is above the bound is not proven.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product
from math import prod
from typing import NamedTuple

from pp_offload._common.checks import check_count
from pp_offload._common.offload_plan import OffloadPlan, PlannedGroup, RankPlan
from pp_offload.config import OffloadConfig
from pp_offload.plan.pipeline import predict
from pp_offload.plan.tape import GroupTape, RankTapes, Tape
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.messages import PeerLink
from pp_offload.simulate.orders import PipelineOrder
from pp_offload.simulate.rank import PipelineStep

GIB = 2**30

MAX_EVENTS = 10_000_000
"""How many events of tapes are played in a search, about: some seconds of a core."""

MAX_TRIES = 512
"""No more steps are tried, however short they are."""

SAME = 1e-6
"""Steps are as short as each other up to this part of them."""

LEAST_TRIES = 24
"""So many steps are tried at least, however long they are."""


class InfeasibleError(ValueError):
    """No choice of groups meets the limit.

    Attributes:
        least_bytes: The least limit that one meets: what the fullest rank needs when all leaves.
    """

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


def choose(
    order: PipelineOrder,
    tapes: Sequence[RankTapes],
    hardware: Hardware,
    limit_bytes: int,
    *,
    config: OffloadConfig | None = None,
    peers: PeerLink | None = None,
    made_for: str = "",
    progress: Callable[[int], None] | None = None,
) -> OffloadPlan:
    """A plan whose peak is below the limit on each rank.

    Args:
        order, tapes, hardware, peers: As for :func:`predict`.
        limit_bytes: For each device. Parameters and gradients are part of the peak; the optimizer,
            and what an allocator cannot use, are not.
        config: The options beside the plan, such as bounds.
        made_for: Model, schedule and device, in words, for who reads the file.
        progress: Called before each step that is predicted, with how many were.

    Raises:
        InfeasibleError: The limit is too low even where all groups leave.
        ValueError: The options say what stays, or :func:`predict` does not know something.
    """
    check_count("limit_bytes", limit_bytes, unit="bytes")
    search = _Search(order, tapes, hardware, config or OffloadConfig(), peers, progress)
    none = search.none()
    best = search.best(limit_bytes)
    ranks = [
        RankPlan(
            stages=stages,
            peak_bytes=one.peak_bytes,
            host_peak_bytes=one.host_peak_bytes,
            seconds=one.seconds,
            stalled_s=one.stalled_s,
        )
        for stages, one in zip(search.stages(best.kept), best.step.ranks, strict=True)
    ]
    return OffloadPlan(made_for, limit_bytes, best.step.seconds, none.seconds, tuple(ranks))


Kept = tuple[int, ...]
"""How many groups of each class stay on a rank: of equal ones those that are saved last."""


class _Class(NamedTuple):
    """Groups of a rank that are equal."""

    nbytes: int
    places: tuple[tuple[int, int], ...]
    """By stage and position, last saved first."""


@dataclass(frozen=True)
class _Tried:
    kept: tuple[Kept, ...]
    step: PipelineStep

    def fits(self, limit_bytes: int) -> bool:
        """Whether no peak is above the limit."""
        return all(rank.peak_bytes <= limit_bytes for rank in self.step.ranks)


class _Search:
    """Tries how much each rank keeps."""

    def __init__(
        self,
        order: PipelineOrder,
        tapes: Sequence[RankTapes],
        hardware: Hardware,
        config: OffloadConfig,
        peers: PeerLink | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._order = order
        self._tapes = tapes
        self._hardware = hardware
        self._config = replace(config, plan=None)
        self._peers = peers
        self._progress = progress
        self._classes = [_classes(one) for one in tapes]
        self._tried: dict[tuple[Kept, ...], _Tried] = {}
        self._none: PipelineStep | None = None
        num = MAX_EVENTS // _num_events(order, tapes)
        self._max_tries = max(LEAST_TRIES, min(num, MAX_TRIES))

    def none(self) -> PipelineStep:
        """The step without offload."""
        if self._none is None:
            self._say()
            self._none = predict(
                self._order, self._tapes, self._hardware, peers=self._peers, num_steps=1
            )
        return self._none

    def best(self, limit_bytes: int) -> _Tried:
        """The shortest step that fits, of all that were tried.

        Raises:
            InfeasibleError: None fits.
        """
        num_choices = prod(len(one.places) + 1 for classes in self._classes for one in classes)
        if num_choices <= self._max_tries:
            for kept in product(*map(_choices, self._classes)):
                self._try(kept)
        else:
            self._fill(limit_bytes)
        fitting = [one for one in self._tried.values() if one.fits(limit_bytes)]
        if not fitting or max(self._first_peaks()) > limit_bytes:
            raise self._infeasible(limit_bytes)
        return self._polished(_best(fitting), limit_bytes)

    def _first_peaks(self) -> list[int]:
        """Those of the first step, in which no engine knows a plan, and all groups leave."""
        step = predict(
            self._order,
            self._tapes,
            self._hardware,
            config=self._config,
            peers=self._peers,
            num_steps=1,
        )
        return [rank.peak_bytes for rank in step.ranks]

    def _infeasible(self, limit_bytes: int) -> InfeasibleError:
        tried = [[rank.peak_bytes for rank in one.step.ranks] for one in self._tried.values()]
        peaks = [max(both) for both in zip(min(tried, key=max), self._first_peaks(), strict=True)]
        least = max(peaks)
        return InfeasibleError(
            f"limit_bytes is {limit_bytes} ({limit_bytes / GIB:.2f} GiB), expected at least "
            f"{least} ({least / GIB:.2f} GiB), which rank {peaks.index(least)} needs whatever "
            "leaves; have more groups leave, take more ranks, shorter microbatches or fewer in "
            "flight",
            least,
        )

    def _fill(self, limit_bytes: int) -> None:
        """Fill each rank up to the limit, all at once."""
        ranks = [_Filling(classes, limit_bytes) for classes in self._classes]
        while any(rank.is_trying for rank in ranks):
            found = self._try([rank.proposal for rank in ranks])
            for rank, one in zip(ranks, found.step.ranks, strict=True):
                rank.told(one.peak_bytes)
        self._settle([rank.proposal for rank in ranks], limit_bytes)

    def _polished(self, best: _Tried, limit_bytes: int) -> _Tried:
        """The shortest that one change after the other leads to."""
        for kept in self._neighbours(best.kept):
            if len(self._tried) >= self._max_tries or self._is_bound(best):
                break
            found = self._try(kept)
            if found.fits(limit_bytes) and _best([best, found]) is found:
                return self._polished(found, limit_bytes)
        return best

    def _is_bound(self, one: _Tried) -> bool:
        """See NOTE [ What is proven ]."""
        return one.step.seconds <= self.none().seconds * (1 + SAME)

    def _neighbours(self, kept: tuple[Kept, ...]) -> Iterator[tuple[Kept, ...]]:
        """One more or one less of a class, or one of another in place of one."""
        for rank, classes in enumerate(self._classes):
            numbers = range(len(classes))
            changes = [{a: 1} for a in numbers] + [{a: -1} for a in numbers]
            changes += [{a: 1, b: -1} for a, b in permutations(numbers, 2)]
            for change in changes:
                mine = tuple(num + change.get(number, 0) for number, num in enumerate(kept[rank]))
                if all(0 <= n <= len(one.places) for n, one in zip(mine, classes, strict=True)):
                    yield (*kept[:rank], mine, *kept[rank + 1 :])

    def _settle(self, kept: list[Kept], limit_bytes: int) -> None:
        """Try together what was found for each rank: what one keeps changes when others wait, and
        with that what is on its way there. Who is above the limit keeps less.
        """
        while not (found := self._try(kept)).fits(limit_bytes):
            less = [
                _one_less(mine) if one.peak_bytes > limit_bytes else mine
                for mine, one in zip(kept, found.step.ranks, strict=True)
            ]
            if less == kept:
                return
            kept = less

    def _try(self, kept: Sequence[Kept]) -> _Tried:
        known = self._tried.get(tuple(kept))
        if known is not None:
            return known
        self._say()
        ranks = tuple(RankPlan(one, 0, 0, 0.0, 0.0) for one in self.stages(kept))
        config = replace(self._config, plan=OffloadPlan("", 0, 0.0, 0.0, ranks))
        step = predict(self._order, self._tapes, self._hardware, config=config, peers=self._peers)
        found = self._tried[tuple(kept)] = _Tried(tuple(kept), step)
        return found

    def stages(self, kept: Sequence[Kept]) -> list[tuple[tuple[PlannedGroup, ...], ...]]:
        """The groups of each rank where it keeps so many of each class."""
        found = []
        for tapes, classes, nums in zip(self._tapes, self._classes, kept, strict=True):
            stay = {
                place for one, num in zip(classes, nums, strict=True) for place in one.places[:num]
            }
            found.append(
                tuple(
                    tuple(
                        PlannedGroup(group.name, _nbytes(tape, group), (stage, position) in stay)
                        for position, group in enumerate(tape.groups)
                    )
                    for stage, tape in sorted(tapes.stages.items())
                )
            )
        return found

    def _say(self) -> None:
        if self._progress is not None:
            self._progress(len(self._tried))


class _Filling:
    """Fills one rank, a proposal after the other.

    Args:
        classes: Of its groups.
        limit_bytes: Its peak may be so high.

    Attributes:
        proposal: What to try next; when nothing is left to try, what was found.
        is_trying: Whether something is left.
    """

    def __init__(self, classes: Sequence[_Class], limit_bytes: int) -> None:
        self._classes = classes
        self._limit_bytes = limit_bytes
        self._proposals = self._search()
        self.proposal: Kept = next(self._proposals)
        self.is_trying = True

    def told(self, peak_bytes: int) -> None:
        """The peak of the proposal."""
        if not self.is_trying:
            return
        try:
            self.proposal = self._proposals.send(peak_bytes)
        except StopIteration as end:
            self.proposal, self.is_trying = end.value, False

    def _search(self) -> Generator[Kept, int, Kept]:
        kept: Kept = (0,) * len(self._classes)
        peak = yield kept
        while peak > self._limit_bytes:
            lower = yield from self._lower(kept, peak)
            if lower is None:
                return kept
            kept, peak = lower
        for number in range(len(self._classes)):
            kept = yield from self._most(kept, number)
        return (yield from self._swapped(kept))

    def _lower(self, kept: Kept, peak: int) -> Generator[Kept, int, tuple[Kept, int] | None]:
        """A lower peak by keeping more: what comes back needs room, too, where little is kept."""
        best: tuple[Kept, int] | None = None
        for number, one in enumerate(self._classes):
            for num in {kept[number] + 1, len(one.places)} - {kept[number]}:
                if num <= len(one.places):
                    more = _with(kept, number, num)
                    found = yield more
                    if found < (peak if best is None else best[1]):
                        best = more, found
        return best

    def _most(self, kept: Kept, number: int) -> Generator[Kept, int, Kept]:
        """As many of a class as fit, by halving."""
        fits, too_many = kept[number], len(self._classes[number].places) + 1
        trial = too_many - 1  # all, to begin with
        while trial > fits:
            found = yield _with(kept, number, trial)
            if found <= self._limit_bytes:
                fits = trial
            else:
                too_many = trial
            trial = (fits + too_many) // 2
        return _with(kept, number, fits)

    def _swapped(self, kept: Kept) -> Generator[Kept, int, Kept]:
        """A larger group in place of a smaller one, where that fits."""
        for large, small in combinations(range(len(self._classes)), 2):
            has_room = kept[large] < len(self._classes[large].places) and kept[small] > 0
            if has_room and self._classes[large].nbytes > self._classes[small].nbytes:
                other = _with(_with(kept, large, kept[large] + 1), small, kept[small] - 1)
                found = yield other
                if found <= self._limit_bytes:
                    kept = yield from self._most(other, small)
        return kept


def _choices(classes: Sequence[_Class]) -> Iterator[Kept]:
    return product(*(range(len(one.places) + 1) for one in classes))


def _num_events(order: PipelineOrder, tapes: Sequence[RankTapes]) -> int:
    """How many events a predicted step has, about."""
    of_each = [
        len(tape.forward) + len(tape.backward) for one in tapes for tape in one.stages.values()
    ]
    return max(1, sum(of_each) * order.num_microbatches)


def _best(tried: Sequence[_Tried]) -> _Tried:
    """The shortest; of those that are as short, one that sends least away, and keeps most."""
    shortest_s = min(one.step.seconds for one in tried)
    short = [one for one in tried if one.step.seconds <= shortest_s * (1 + SAME)]
    return min(short, key=lambda one: (_bytes_sent(one), -sum(map(sum, one.kept))))


def _bytes_sent(tried: _Tried) -> int:
    return sum(rank.bytes_offloaded for rank in tried.step.ranks)


def _with(kept: Kept, number: int, num: int) -> Kept:
    return (*kept[:number], num, *kept[number + 1 :])


def _one_less(kept: Kept) -> Kept:
    """One less of the smallest class of which some stay."""
    for number in range(len(kept) - 1, -1, -1):
        if kept[number]:
            return _with(kept, number, kept[number] - 1)
    return kept


def _classes(tapes: RankTapes) -> list[_Class]:
    """Of a rank's groups that have something to move, largest first."""
    places: defaultdict[tuple[int, int, str], list[tuple[int, int]]] = defaultdict(list)
    for stage, tape in tapes.stages.items():
        for position, group in enumerate(tape.groups):
            if group.payloads:
                places[_nbytes(tape, group), stage, group.name].append((stage, position))
    return [_Class(key[0], tuple(places[key][::-1])) for key in sorted(places, reverse=True)]


def _nbytes(tape: Tape, group: GroupTape) -> int:
    return sum(tape.payloads[index].nbytes for index in group.payloads)
