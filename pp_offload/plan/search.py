"""Which groups each rank keeps, where it is settled which layers are recomputed.

    search = Search(steps, tapes)
    tried = search.best(limit_bytes)
    search.stages(tried.kept), tried.step.seconds

Offload costs nothing until compute waits for copies, and never helps a step. So each rank keeps as
much as the limit lets it, and sends away what a forward saves first, which is needed last.
Ranks differ, for the first of a pipeline has the most microbatches in flight. Where the link has
too much to do, another one of equal groups may have a better time to leave or to come back: so
what was found is changed group by group in the end.

NOTE [ What is proven ]
    The step without offload is a lower bound of all plans. Each rank has its operators in the same
    order whatever leaves; a plan adds waits, and a wait never makes anything begin earlier. That
    the peak is below the limit is not reckoned, but played. That no plan of another kind is faster
    where ours is above the bound is not proven.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import comb, prod

from pp_offload._common.offload_plan import PlannedGroup, RankPlan
from pp_offload._common.option_sources import bytes_said, size_said
from pp_offload.plan.changes import (
    Stay,
    class_changed,
    flipped,
    group_changed,
    stay_of,
    subsets,
)
from pp_offload.plan.classes import Class, Kept, classes_of, num_groups, spread_out
from pp_offload.plan.filled import fill, settle
from pp_offload.plan.filling import has_many
from pp_offload.plan.pipeline import FirstStep
from pp_offload.plan.steps import SAME, Steps, Tried, best_of
from pp_offload.plan.tape import RankTapes
from pp_offload.simulate.rank import PipelineStep

GIB = 2**30

Stages = tuple[tuple[PlannedGroup, ...], ...]
"""Groups of a rank, by virtual stage."""

TRIES_FILLED_UP = 7
"""At least so many for sending less away in a step that is as short."""

TRIES_TO_FILL = 24
"""At least so many for filling ranks: a plan is found however long a prediction takes."""

PART_FOR_ALL = 2
"""All choices are tried where that is no more than one in so many of the tries that are left."""

MOST_FLIPPED = 3
"""So many groups at a time are changed, of any ranks, where all such changes can be tried."""


class InfeasibleError(ValueError):
    """No choice of groups meets the limit.

    Attributes:
        least_bytes: The least limit that one meets: what the fullest rank needs whatever leaves.
    """

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class Search:
    """Tries how much each rank keeps.

    Args:
        steps: Predicts them.
        tapes: Of all ranks.
        other: Of the same tapes, whose bounds are those that an engine chooses by itself; None
            where that is so here.
        part: Of these bounds, that hold here instead. One group is on its way whatever they are.

    Attributes:
        tapes: See above.
    """

    def __init__(
        self,
        steps: Steps,
        tapes: Sequence[RankTapes],
        other: Search | None = None,
        part: float = 1.0,
    ) -> None:
        self._steps = steps
        self.tapes = tapes
        self._other = other
        self._part = part
        self._classes = [classes_of(one) for one in tapes]
        self._tried: dict[tuple[Stay, ...], Tried] = {}
        self._filled: dict[int, list[Stay]] = {}
        """By limit, as much as fits on each rank, however long a step is."""

    @cached_property
    def without_offload(self) -> PipelineStep:
        """The step in which all stays; see NOTE [ What is proven ]."""
        if self._other is not None:
            return self._other.without_offload
        return self._steps.without_offload(self.tapes)

    def all_leave(self) -> PipelineStep:
        """A later step in which all groups leave."""
        return self._try([frozenset()] * len(self.tapes)).step

    @cached_property
    def _first(self) -> FirstStep:
        return self._steps.first(self.tapes) if self._other is None else self._other._first

    @cached_property
    def _bounds(self) -> list[tuple[int | None, int | None]]:
        """Of each rank, in flight and ahead; None where an engine is to choose them."""
        if self._other is None:
            return [(None, None)] * len(self.tapes)
        chosen = [rank.bounds for rank in self._other.all_leave().ranks]
        return [(self._smaller(in_flight), self._smaller(ahead)) for in_flight, ahead in chosen]

    def _smaller(self, nbytes: int) -> int:
        return max(1, int(self._part * nbytes))  # with 0 in flight, compute waits for each copy

    @cached_property
    def roomier(self) -> Search | None:
        """The same with as much host memory as groups take; None where that changes nothing."""
        if self._steps.config.host_budget_bytes is None:
            return None
        steps = self._steps.with_more_on_the_host()
        other = Search(steps, self.tapes)
        if self._other is not None:
            other = Search(steps, self.tapes, other, self._part)
        is_same = other._first.step == self._first.step and other.all_leave() == self.all_leave()
        return None if is_same else other

    def found(self, limit_bytes: int, most_steps: int) -> Tried | None:
        """A short step that fits: the shortest, where there are few choices; None if there is none.

        Args:
            limit_bytes: For each rank.
            most_steps: There is time until so many are predicted.
        """
        self._look(limit_bytes, most_steps)
        return self.best_fitting(limit_bytes)

    def filled(self, limit_bytes: int, most_steps: int) -> Tried:
        """The step in which each rank keeps what it can of what is saved last, however long it is.
        A rank that needs more than the limit whatever leaves is above it.
        """
        if limit_bytes not in self._filled:
            self._filled[limit_bytes] = self._fill_by(self._classes, limit_bytes, most_steps)
        return settle(self._try, self._filled[limit_bytes], self._classes, limit_bytes)

    def of_single_groups(self, limit_bytes: int, most_steps: int) -> Tried | None:
        """The shortest that fits of all choices of single groups, where they are few; else None.

        Which of equal groups stays makes a difference to a peak where host memory has no room for
        all that leaves.
        """
        if 2**self._num_groups - len(self._tried) > most_steps - self._steps.num:
            return None
        for kept in product(*map(subsets, self._classes)):
            self._try(kept)
        return self.best_fitting(limit_bytes)

    def best_fitting(self, limit_bytes: int) -> Tried | None:
        """The shortest that fits of those that were tried; None if there is none."""
        fitting = self._fitting(limit_bytes)
        return best_of(fitting) if fitting else None

    def _fitting(self, limit_bytes: int) -> list[Tried]:
        return [one for one in self._tried.values() if one.fits(limit_bytes)]

    def _look(self, limit_bytes: int, most_steps: int) -> None:
        num_choices = prod(len(one.places) + 1 for classes in self._classes for one in classes)
        if num_choices <= (most_steps - self._steps.num) // PART_FOR_ALL:
            for nums in product(*map(_choices, self._classes)):
                self._try(self._stays(nums))
        else:
            self._fill(limit_bytes, most_steps)

    def polished(self, best: Tried, limit_bytes: int, most_steps: int) -> Tried:
        """The shortest of all choices of single groups where they are few; else that to which one
        change after the other leads, until so many are predicted.
        """
        filled = self._filled.get(limit_bytes, list(best.kept))
        until = max(most_steps, self._steps.num + TRIES_FILLED_UP)
        best = self._filled_up(best, filled, limit_bytes, until)
        if not self.is_bound(best):
            found = self.of_single_groups(limit_bytes, most_steps)
            if found is not None:
                return found
        best = self._changed(best, limit_bytes, most_steps)
        other = self._try(filled)  # changes of the best one may lead nowhere
        if other.fits(limit_bytes) and not self.is_bound(best):
            best = best_of([best, self._changed(other, limit_bytes, most_steps)])
        return best

    def _changed(self, one: Tried, limit_bytes: int, most_steps: int) -> Tried:
        """To what one change after the other leads, each to a shorter step."""
        seen: set[tuple[Stay, ...]] = set()  # of two that are as short, each may be a bit better
        while (better := self._better(one, limit_bytes, most_steps, seen)) is not None:
            one = better
        return one

    @property
    def _num_groups(self) -> int:
        return sum(map(num_groups, self._classes))

    def _filled_up(
        self, best: Tried, filled: Sequence[Stay], limit_bytes: int, most_steps: int
    ) -> Tried:
        """The same with as much more staying as can be in a step that is as short: whole ranks
        first, then what can be of each of the others.
        """
        ranks = _differing(best, filled)
        best = self._ranks_filled(best, filled, ranks, limit_bytes, most_steps)
        for rank in _differing(best, filled):
            best = self._partly_filled(best, filled[rank], rank, limit_bytes, most_steps)
        return best

    def _ranks_filled(
        self,
        best: Tried,
        filled: Sequence[Stay],
        ranks: Sequence[int],
        limit_bytes: int,
        most_steps: int,
    ) -> Tried:
        """With as many of these ranks filled."""
        if not ranks or self._steps.num >= most_steps:
            return best
        kept = [filled[rank] if rank in ranks else one for rank, one in enumerate(best.kept)]
        found = self._try(kept)
        if found.fits(limit_bytes) and best_of([best, found]) is found:
            return found
        if len(ranks) > 1:
            middle = len(ranks) // 2
            for half in (ranks[:middle], ranks[middle:]):
                best = self._ranks_filled(best, filled, half, limit_bytes, most_steps)
        return best

    def _partly_filled(
        self, best: Tried, filled: Stay, rank: int, limit_bytes: int, most_steps: int
    ) -> Tried:
        """With as many groups more on one rank as can be, largest first; all are too many."""
        mine = best.kept[rank]
        missing = filled - mine
        more = [place for one in self._classes[rank] for place in one.places if place in missing]
        fits, too_many = 0, len(more)
        while too_many - fits > 1 and self._steps.num < most_steps:
            num = (fits + too_many) // 2
            found = self._try(_with(best.kept, rank, mine.union(more[:num])))
            if found.fits(limit_bytes) and best_of([best, found]) is found:
                fits, best = num, found
            else:
                too_many = num
        return best

    def _better(
        self, best: Tried, limit_bytes: int, most_steps: int, seen: set[tuple[Stay, ...]]
    ) -> Tried | None:
        for kept in self._neighbours(best, most_steps):
            if self._steps.num >= most_steps or self.is_bound(best):
                return None
            if kept in seen:
                continue
            seen.add(kept)
            found = self._try(kept)
            if found.fits(limit_bytes) and best_of([best, found]) is found:
                return found
        return None

    def is_bound(self, one: Tried) -> bool:
        """Whether no choice is faster, with the same layers recomputed."""
        return one.step.seconds <= self.without_offload.seconds * (1 + SAME)

    def infeasible(self, limit_bytes: int) -> InfeasibleError:
        """Says the least limit that can be met, of one that cannot."""
        least = self.least(limit_bytes)
        rank = [one.peak_bytes for one in least.step.ranks].index(least.peak_bytes)
        needed = bytes_said(least.peak_bytes, is_least=True)
        return InfeasibleError(
            f"limit_bytes is {bytes_said(limit_bytes)}, expected at least {needed}, which rank "
            f"{rank} needs whatever leaves{self._of_that(rank)}; "
            f"{self._more_host_memory(limit_bytes, least.peak_bytes)}name more modules as groups, "
            "take more ranks, shorter microbatches or fewer in flight",
            least.peak_bytes,
        )

    def least(self, limit_bytes: int) -> Tried:
        """The choice with the lowest peak, of what is tried for a limit that cannot be met."""
        self._look(limit_bytes, self._steps.num)
        return min(self._tried.values(), key=lambda one: one.peak_bytes)

    def lowest_peak(self, limit_bytes: int) -> int:
        """Of the same, as an engine follows it."""
        while not (least := self.least(limit_bytes)).is_followed:
            self.followed(least)
        return least.peak_bytes

    def followed(self, tried: Tried) -> Tried:
        """The same choice as an engine follows it. From now on it is known so."""
        step = self._steps.followed(self.tapes, self.plans(tried))
        found = self._tried[tried.kept] = replace(tried, step=step, is_followed=True)
        return found

    def plans(self, tried: Tried) -> list[RankPlan]:
        """What each rank does by a choice, with the bounds that it had."""
        return [
            _planned(stages, rank.bounds)
            for stages, rank in zip(self.stages(tried.kept), tried.step.ranks, strict=True)
        ]

    def _of_that(self, rank: int) -> str:
        """How much of it is an optimizer's, on which no choice of groups has an effect."""
        nbytes = self.tapes[rank].update.state_bytes
        return f", {size_said(nbytes)} of that for its optimizer's state" if nbytes else ""

    def _more_host_memory(self, limit_bytes: int, least: int) -> str:
        """What to give, if less than ``least`` is enough where all that leaves has room."""
        if self.roomier is None:
            return ""
        enough = self.roomier.lowest_peak(limit_bytes)
        if enough >= least:
            return ""
        host = max(rank.host_peak_bytes for rank in self.roomier.all_leave().ranks)
        return (
            f"give a larger host_budget_bytes than {self._steps.config.host_budget_bytes}: all "
            f"groups take {host} on a rank, and then {bytes_said(enough, is_least=True)} are "
            "enough; "
        )

    def _fill(self, limit_bytes: int, most_steps: int) -> None:
        """Fill each rank up to the limit, largest groups first. Where that is longer than without
        offload, once more with what leaves spread out, and once more with many classes one by one
        where there is a try for each.
        """
        self.filled(limit_bytes, most_steps)
        if self._is_worth_more(limit_bytes, most_steps):
            self._fill_by(list(map(spread_out, self._classes)), limit_bytes, most_steps)
        num = max(map(len, filter(has_many, self._classes)), default=most_steps)
        has_time = self._steps.num + num < most_steps
        if has_time and self._fitting(limit_bytes) and self._is_worth_more(limit_bytes, most_steps):
            self._fill_by(self._classes, limit_bytes, most_steps, one_by_one=True)
        if not self._fitting(limit_bytes):  # ranks that were full alone may have no room together
            self.all_leave()

    def _is_worth_more(self, limit_bytes: int, most_steps: int) -> bool:
        """Whether there is time, and nothing is as short as a step can be."""
        fitting = self._fitting(limit_bytes)
        is_bound = bool(fitting) and self.is_bound(best_of(fitting))
        return not is_bound and self._steps.num < most_steps

    def _fill_by(
        self,
        ranks: Sequence[Sequence[Class]],
        limit_bytes: int,
        most_steps: int,
        *,
        one_by_one: bool = False,
    ) -> list[Stay]:
        """The same in the order of these classes; what was found."""
        most_tries = max(TRIES_TO_FILL, most_steps - self._steps.num)
        found = fill(self._try, ranks, limit_bytes, most_tries, one_by_one=one_by_one)
        settle(self._try, found, ranks, limit_bytes)
        return found

    def _neighbours(self, tried: Tried, most_steps: int) -> Iterator[tuple[Stay, ...]]:
        """With a change on one rank: first on those that stand still longest for copies, and of
        classes before that of groups, where there is a try for each of them. Of more the first ones
        alone would be changed, and of so many each means little. Then with several groups changed,
        where all such choices can be tried until ``most_steps`` are predicted.
        """
        kept, ranks = tried.kept, tried.step.ranks
        slowest = sorted(range(len(ranks)), key=lambda rank: -ranks[rank].stalled_s)
        for change, how_many in ((class_changed, len), (group_changed, num_groups)):
            for rank in slowest:
                classes = self._classes[rank]
                if how_many(classes) <= self._steps.max_tries:
                    for mine in change(kept[rank], classes):
                        yield _with(kept, rank, mine)
        for num in range(2, MOST_FLIPPED + 1):
            if comb(self._num_groups, num) <= most_steps - self._steps.num:
                yield from flipped(kept, self._classes, num)

    def _try(self, kept: Sequence[Stay]) -> Tried:
        known = self._tried.get(tuple(kept))
        if known is not None:
            return known
        stages = self.stages(kept)
        ranks = list(map(_planned, stages, self._bounds))
        step = self._steps.planned(self._first, ranks)
        found = self._tried[tuple(kept)] = Tried(tuple(kept), step)
        return found

    def _stays(self, nums: Sequence[Kept]) -> list[Stay]:
        return [stay_of(*both) for both in zip(self._classes, nums, strict=True)]

    def stages(self, kept: Sequence[Stay]) -> list[Stages]:
        """The groups of each rank, of which these stay."""
        return [tapes.planned(stay) for tapes, stay in zip(self.tapes, kept, strict=True)]


def _planned(stages: Stages, bounds: tuple[int | None, int | None]) -> RankPlan:
    in_flight, ahead = bounds
    return RankPlan(stages, max_in_flight_bytes=in_flight, prefetch_bytes=ahead)


def _differing(best: Tried, filled: Sequence[Stay]) -> list[int]:
    """Ranks on which something else stays."""
    return [rank for rank, kept in enumerate(filled) if kept != best.kept[rank]]


def _with(kept: Sequence[Stay], rank: int, mine: Stay) -> tuple[Stay, ...]:
    """The same but for what stays on one rank."""
    return (*kept[:rank], mine, *kept[rank + 1 :])


def _choices(classes: Sequence[Class]) -> Iterator[Kept]:
    return product(*(range(len(one.places) + 1) for one in classes))
