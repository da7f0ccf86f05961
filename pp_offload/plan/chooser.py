"""What each rank keeps, sends away and recomputes, so that no device's peak is above a limit.

    plan = choose(order, tapes, DEVICES["H100"], 40 * 2**30)
    plan.save("plan.json")

    chooser = Chooser(order, tapes, DEVICES["H100"])
    chooser.plan(40 * 2**30), chooser.plan(30 * 2**30)  # the second one takes less time

NOTE [ When to recompute ]
    What is recomputed takes time in any case, and what leaves only where the link has too much to
    do. So all is planned without recomputation first, and no more where that is about as fast as
    without any offload. Else the ranks that are above the limit without it recompute layers. How
    many is looked for on all ranks at once, by halves, for one says little of another: as few as
    are enough, but no fewer than those with which compute works and waits no longer than with more.
    What is found is changed rank by rank in the end, the slowest first. A number of layers is
    passed over where the step is too long even if everything stayed.

NOTE [ Which bounds ]
    An engine chooses its bounds so that compute waits as little as it can. Where the link has too
    much to do it waits all the same, and what is on its way takes room in which groups could stay.
    So all is tried with smaller ones, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from pp_offload._common.checks import check_count
from pp_offload._common.garbage import collector_off
from pp_offload._common.offload_plan import OffloadPlan
from pp_offload._groups.plan_options import options_of
from pp_offload.config import AUTO, OffloadConfig
from pp_offload.plan.search import InfeasibleError, Search
from pp_offload.plan.steps import SAME, Steps, Tried, most_tries
from pp_offload.plan.tape import RankTapes
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.messages import PeerLink
from pp_offload.simulate.orders import PipelineOrder
from pp_offload.simulate.rank import PipelineStep, RankStep

WORTH_IT = 1e-3
"""Other numbers are tried where they could save such a part of a step."""

BOUNDS = (1.0, 0.5, 0.0)
"""Such parts are tried of the bounds that an engine would choose by itself, see NOTE [ Which bounds
]; with the last one a group at a time is on its way.
"""

Nums = tuple[int, ...]
"""How many layers each rank recomputes."""


class Way(NamedTuple):
    """What is settled before groups are chosen."""

    nums: Nums
    bounds: float = 1.0
    """One of :data:`BOUNDS`."""


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
        limit_bytes: For each device. Parameters and gradients are part of the peak, and the
            optimizer if the tapes have one; what an allocator cannot use is not.
        config: The options beside the plan, such as bounds. With ``host_budget_bytes`` the plan is
            for so much host memory on each rank; a group that finds no room there stays.
        made_for: Model, schedule and device, in words, for who reads the file.
        progress: Called before each step that is predicted, with how many were.

    Raises:
        InfeasibleError: The limit is too low even where all groups leave, and what may be
            recomputed is.
        ValueError: The options say what stays, or :func:`predict` does not know something.
    """
    chooser = Chooser(order, tapes, hardware, config=config, peers=peers, progress=progress)
    return chooser.plan(limit_bytes, made_for=made_for)


class Chooser:
    """Makes plans for one pipeline. What was predicted for one limit is known for the next.

    Args:
        order, tapes, hardware, config, peers, progress: As for :func:`choose`.
    """

    def __init__(
        self,
        order: PipelineOrder,
        tapes: Sequence[RankTapes],
        hardware: Hardware,
        *,
        config: OffloadConfig | None = None,
        peers: PeerLink | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._tapes = tapes
        self._steps = Steps(
            order, hardware, config or OffloadConfig(), peers, progress, most_tries(order, tapes)
        )
        self._searches: dict[Way, Search] = {}

    def plan(self, limit_bytes: int, *, made_for: str = "") -> OffloadPlan:
        """See :func:`choose`."""
        check_count("limit_bytes", limit_bytes, unit="bytes")
        # Each step leaves a few MB in cycles. To look for them after each one takes long, for that
        # looks at all that is kept of first steps too; and where steps are large, few are tried.
        with collector_off():
            best = self._best(limit_bytes)
        search, tried = self._search(best.way), best.tried
        ranks = [
            replace(
                plan,
                recomputed=tapes.recomputed,
                peak_bytes=one.peak_bytes,
                optimizer_bytes=tapes.update.state_bytes,
                host_peak_bytes=one.host_peak_bytes,
                seconds=one.seconds,
                busy_s=one.busy_s,
                stalled_s=one.stalled_s,
                bytes_offloaded=one.bytes_offloaded,
                on_demand_reloads=one.on_demand_reloads,
                offload_s=one.offload_s,
            )
            for plan, one, tapes in zip(
                search.plans(tried), tried.step.ranks, search.tapes, strict=True
            )
        ]
        least_s = self.without_offload().seconds
        order = self._steps.order
        options = options_of(
            self._steps.config,
            num_microbatches=order.num_microbatches,
            schedule=order.schedule_name,
        )
        return OffloadPlan(made_for, limit_bytes, best.seconds, least_s, tuple(ranks), options)

    def without_offload(self) -> PipelineStep:
        """The step in which all stays and nothing is recomputed."""
        return self._search(self._nothing).without_offload

    def with_more_on_the_host(self, plan: OffloadPlan) -> OffloadPlan | None:
        """A plan for the same limit with as much host memory as it takes, if its step is shorter.

        Then ``host_budget_bytes`` is what binds. Takes as long as ``plan`` did, but where a shorter
        step is not worth it, or all groups have room.
        """
        if not _is_worth(plan.least_seconds, plan.seconds):
            return None
        if self._search(self._nothing).roomier is None:
            return None
        steps = self._steps.with_more_on_the_host()
        other = Chooser(
            steps.order,
            self._tapes,
            steps.hardware,
            config=steps.config,
            peers=steps.peers,
            progress=steps.progress,
        )
        try:
            found = other.plan(plan.limit_bytes, made_for=plan.made_for)
        except InfeasibleError:  # what comes back needs room, too
            return None
        return found if _is_shorter(found.seconds, plan.seconds) else None

    def recomputed(self) -> PipelineStep | None:
        """The step in which all layers are recomputed and nothing leaves; None without layers."""
        nums = tuple(one.num_layers for one in self._tapes)
        return self._search(Way(nums)).without_offload if any(nums) else None

    @property
    def _nothing(self) -> Way:
        return Way((0,) * len(self._tapes))

    def _best(self, limit_bytes: int) -> _Found:
        """The best, as an engine follows it.

        What that is may differ from what was tried, where host memory is laid out in another way.
        Rarely it is above the limit, or takes longer, and another one is the best; or it is below
        the limit, where all that was tried is above.

        Raises:
            InfeasibleError: There is none.
        """
        trial = self._trial(limit_bytes)
        while True:
            found = self._polished(trial)
            if found.tried.is_followed and found.tried.fits(limit_bytes):
                return found
            followed = self._search(found.way).followed(found.tried)
            is_longer = _is_shorter(found.seconds, followed.step.seconds)
            if followed.fits(limit_bytes) and not is_longer:
                return replace(found, tried=followed)

    def _trial(self, limit_bytes: int) -> _Trial:
        """Ways that could be worth it, each tried."""
        trial = _Trial(self._steps, self._search, limit_bytes)
        for bounds in self._parts_of_bounds:
            trial.take(self._nothing._replace(bounds=bounds))
        is_enough = trial.best is not None and not _is_worth(
            self.without_offload().seconds, trial.best.seconds
        )
        needy = {} if is_enough else self._needy(limit_bytes)  # to record others takes long
        if needy:
            trial.recompute(needy, self._nothing.nums, self._parts_of_bounds)
            trial.descend(needy)
        return trial

    def _polished(self, trial: _Trial) -> _Found:
        """The best of what is tried; the one with the lowest peak, where none fits.

        Raises:
            InfeasibleError: None fits, and that one is as an engine follows it.
        """
        limit_bytes, most_steps = trial.limit_bytes, trial.most_steps
        best = trial.best_now() or trial.of_single_groups() or trial.lowest()
        if not best.tried.fits(limit_bytes):
            if best.tried.is_followed:
                raise self._search(best.way).infeasible(limit_bytes)
            return best
        tried = self._search(best.way).polished(best.tried, limit_bytes, most_steps)
        return self._with_other_bounds(_Found(best.way, tried), limit_bytes, most_steps)

    def _with_other_bounds(self, best: _Found, limit_bytes: int, most_steps: int) -> _Found:
        """The best one, also of what is found near the best with each of the other bounds, as far
        as there is time.

        Where which of equal groups stays makes a difference, the best bounds may be others, too.
        """
        for bounds in self._parts_of_bounds:
            way = best.way._replace(bounds=bounds)
            search = self._search(way)
            if way == best.way or search.is_bound(best.tried):
                continue
            tried = search.of_single_groups(limit_bytes, most_steps)
            other = None if tried is not None else search.best_fitting(limit_bytes)
            if other is not None and self._steps.num < most_steps:
                tried = search.polished(other, limit_bytes, most_steps)
            if tried is not None and _is_shorter(tried.step.seconds, best.seconds):
                best = _Found(way, tried)
        return best

    @property
    def _parts_of_bounds(self) -> Sequence[float]:
        """Those that may be tried: only the first one where the options say what the bounds are."""
        config = self._steps.config
        is_free = AUTO in (config.max_in_flight_bytes, config.prefetch_bytes)
        return BOUNDS if is_free else BOUNDS[:1]

    def _needy(self, limit_bytes: int) -> dict[int, int]:
        """Ranks that are above the limit where all stays; and how many layers they have."""
        stays = self._search(self._nothing).without_offload.ranks
        return {
            rank: self._tapes[rank].num_layers
            for rank, one in enumerate(stays)
            if one.peak_bytes > limit_bytes and self._tapes[rank].num_layers
        }

    def _search(self, way: Way) -> Search:
        if way not in self._searches:
            if way.bounds != 1:
                other = self._search(Way(way.nums))
                self._searches[way] = Search(self._steps, other.tapes, other, way.bounds)
            else:
                tapes = [
                    one.recomputing(num) for one, num in zip(self._tapes, way.nums, strict=True)
                ]
                self._searches[way] = Search(self._steps, tapes)
        return self._searches[way]


@dataclass(frozen=True)
class _Found:
    """A choice that fits."""

    way: Way
    tried: Tried

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.tried.step.seconds


class _Cost(NamedTuple):
    """What a number of layers costs a rank."""

    above_bytes: int
    """Of its peak, above the limit."""

    seconds: float

    def is_more_than(self, other: _Cost) -> bool:
        """Whether it is worse: above all, to be above the limit."""
        if self.above_bytes != other.above_bytes:
            return self.above_bytes > other.above_bytes
        return _is_shorter(other.seconds, self.seconds)


class _Trial:
    """Ways that are tried for one limit, and the best of them. See NOTE [ When to recompute ].

    Attributes:
        limit_bytes: For each rank.
        most_steps: There is time until so many are predicted. What it takes to find how many layers
            are recomputed does not count.
        best: Of those that fit, so far; None if none does.
    """

    def __init__(self, steps: Steps, search_of: Callable[[Way], Search], limit_bytes: int) -> None:
        self._steps = steps
        self._search_of = search_of
        self.limit_bytes = limit_bytes
        self.most_steps = steps.num + steps.max_tries
        self._taken: dict[Way, None] = {}
        self._looked_at: dict[Nums, None] = {}
        self.best: _Found | None = None

    def take(self, way: Way) -> bool:
        """Try it, if it could be worth it; whether it is better than all others."""
        if way in self._taken:
            return False
        self._taken[way] = None
        search, best = self._search_of(way), self.best
        if best is not None and not _is_worth(search.without_offload.seconds, best.seconds):
            return False
        tried = search.found(self.limit_bytes, self.most_steps)
        if tried is None:
            return False
        found = _Found(way, tried)
        if best is not None and not _is_shorter(found.seconds, best.seconds):
            return False
        self.best = found
        return True

    def best_now(self) -> _Found | None:
        """The best of all that was tried, which may be known better than when it was."""
        best: _Found | None = None
        for way in self._taken:
            tried = self._search_of(way).best_fitting(self.limit_bytes)
            if tried is None:
                continue
            if best is None or _is_shorter(tried.step.seconds, best.seconds):
                best = _Found(way, tried)
        return best

    def recompute(
        self, layers: Mapping[int, int], nothing: Nums, parts_of_bounds: Sequence[float]
    ) -> None:
        """Recompute as many layers as each rank needs.

        Args:
            layers: How many each rank has, of those that may have some recomputed.
            nothing: No layers, on each rank.
            parts_of_bounds: With which what is found is tried.
        """
        for nums in (self._needed(layers, nothing), _with(nothing, layers)):
            for bounds in parts_of_bounds:
                self.take(Way(nums, bounds))
        self.most_steps = self._steps.num + self._steps.max_tries
        if self.best is None:  # what fits may be any that was looked at, the last ones above all
            for nums in takewhile(lambda _: self._has_time(), [*self._looked_at][::-1]):
                self.take(Way(nums, parts_of_bounds[-1]))

    def _needed(self, layers: Mapping[int, int], nothing: Nums) -> Nums:
        """How many each rank needs; see NOTE [ When to recompute ]."""
        ranks = self._ranks(nothing)
        too_few = {rank: -(ranks[rank].peak_bytes <= self.limit_bytes) for rank in layers}
        enough = dict(layers)
        costs = dict(enumerate(map(self._cost, self._ranks(_with(nothing, layers)))))
        while any(enough[rank] - too_few[rank] > 1 for rank in layers):
            trial = {rank: (too_few[rank] + enough[rank] + 1) // 2 for rank in layers}
            ranks = self._ranks(_with(nothing, trial))
            for rank, num in trial.items():
                cost = self._cost(ranks[rank])
                if cost.is_more_than(costs[rank]):
                    too_few[rank] = min(num, enough[rank] - 1)
                else:
                    enough[rank], costs[rank] = num, cost
        return self._settled(layers, _with(nothing, enough))

    def _settled(self, layers: Mapping[int, int], nums: Nums) -> Nums:
        """With more on ranks that are above the limit, for what one does changes others a bit."""
        while True:
            above = [
                rank
                for rank, one in enumerate(self._ranks(nums))
                if one.peak_bytes > self.limit_bytes and nums[rank] < layers.get(rank, 0)
            ]
            if not above:
                return nums
            nums = _with(nums, {rank: nums[rank] + 1 for rank in above})

    def _cost(self, rank: RankStep) -> _Cost:
        return _Cost(max(0, rank.peak_bytes - self.limit_bytes), _cost_s(rank))

    def _ranks(self, nums: Nums) -> Sequence[RankStep]:
        """What each rank costs where it keeps what it can."""
        self._looked_at[nums] = None
        filled = self._search_of(Way(nums)).filled(self.limit_bytes, self.most_steps)
        return filled.step.ranks

    def descend(self, layers: Mapping[int, int]) -> None:
        """Change the best rank by rank, for as long as that helps and there is time: by a layer,
        and by more where that helps no longer.

        Args:
            layers: How many each rank has, of those that may have some recomputed.
        """
        steps = [2**power for power in range(max(layers.values()).bit_length())]
        while any(self._change(layers, step) for step in steps):
            pass

    def _change(self, layers: Mapping[int, int], step: int) -> bool:
        """Change the best on one rank by so many layers; whether that is better."""
        if self.best is None:
            return False
        way, ranks = self.best.way, self.best.tried.step.ranks
        slowest = sorted(layers, key=lambda rank: -_cost_s(ranks[rank]))
        near = _near(way.nums, {rank: layers[rank] for rank in slowest}, step)
        return any(
            self._is_promising(other) and self.take(other)
            for nums in takewhile(lambda _: self._has_time(), near)
            if (other := way._replace(nums=nums)) not in self._taken
        )

    def _is_promising(self, way: Way) -> bool:
        """Whether it is about as good as the best where each rank keeps what it can: to look at
        more choices takes long.
        """
        filled = self._search_of(way).filled(self.limit_bytes, self.most_steps)
        return self.best is None or (
            filled.fits(self.limit_bytes)
            and not _is_shorter(self.best.seconds * (1 + WORTH_IT), filled.step.seconds)
        )

    def _has_time(self) -> bool:
        return self._steps.num < self.most_steps

    def of_single_groups(self) -> _Found | None:
        """The first choice that fits of those, where nothing else does."""
        for way in self._taken:
            tried = self._search_of(way).of_single_groups(self.limit_bytes, self.most_steps)
            if tried is not None:
                return _Found(way, tried)
        return None

    def lowest(self) -> _Found:
        """The one with the lowest peak, where none fits."""
        found = [_Found(way, self._search_of(way).least(self.limit_bytes)) for way in self._taken]
        return min(found, key=lambda one: one.tried.peak_bytes)


def _with(nums: Nums, others: Mapping[int, int]) -> Nums:
    """The same with these on their ranks."""
    return tuple(others.get(rank, num) for rank, num in enumerate(nums))


def _cost_s(rank: RankStep) -> float:
    """For how long its compute works, and waits for copies."""
    return rank.busy_s + rank.stalled_s


def _near(nums: Nums, layers: Mapping[int, int], step: int) -> Iterator[Nums]:
    """One rank recomputes so many more or fewer; fewer first."""
    for rank, most in layers.items():
        for num in (max(0, nums[rank] - step), min(most, nums[rank] + step)):
            yield (*nums[:rank], num, *nums[rank + 1 :])


def _is_shorter(one_s: float, other_s: float) -> bool:
    return one_s < other_s * (1 - SAME)


def _is_worth(least_s: float, found_s: float) -> bool:
    """Whether what takes so long at least may be enough shorter than what was found."""
    return least_s < found_s * (1 - WORTH_IT)
