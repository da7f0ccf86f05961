"""Choose what each rank keeps, sends away and recomputes, so that no peak is above a limit.

    plan = choose(order, tapes, DEVICES["H100"], 40 * 2**30)
    plan.save("plan.json")

    chooser = Chooser(order, tapes, DEVICES["H100"])
    chooser.plan(40 * 2**30), chooser.plan(30 * 2**30)  # tapes are recorded once

A plan is the best of a few ways: each rank keeps as much as fits, in four orders, within three
sizes of bounds, with and without recomputed layers. A single way may be several times too slow, but
the best of all ways is near the optimum (benchmarks/results/plan_search.txt). The chosen plan was
predicted as an engine follows it from its first step on.

NOTE [ No plan is faster ]
    The step without offload is a lower bound. Each rank runs its operators in the same order with
    any plan; a plan adds waits, and a wait never makes an operator begin earlier. So the search
    ends with a plan whose step is as short.

NOTE [ When to recompute ]
    Recomputation always takes time, a copy only if the link is overloaded. So ways without
    recomputation are tried first. If the step could be shorter with a single layer recomputed,
    ranks that are above the limit without offload recompute layers: as few as suffice, but no fewer
    than the number from which more layers do not make compute and its waits shorter. The number is
    searched on all ranks at once, by halves, because the number of one rank has little effect on
    other ranks.

NOTE [ Which bounds ]
    Orders are tried within the bounds that an engine chooses if all groups leave. If the link is
    overloaded, compute waits with any bounds, and copies in flight take room in which groups could
    stay. So the best order is also tried within parts of these bounds, and within those that an
    engine would choose for the groups that leave in the best way so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from operator import mul

from pp_offload._common.checks import check_count
from pp_offload._common.offload_plan import OffloadPlan, RankPlan
from pp_offload._common.processes import collector_off
from pp_offload._common.text import bytes_text, size_text
from pp_offload._core.group import Place
from pp_offload._groups.plan import options_of
from pp_offload.config import AUTO, OffloadConfig
from pp_offload.plan.fills import (
    Candidate,
    Fill,
    as_saved,
    first_saved,
    largest_first,
    spread_out,
)
from pp_offload.plan.predictor import (
    Bounds,
    Choice,
    Nums,
    Predictor,
    RankChoice,
    Tried,
    choice_of,
    nums_of,
)
from pp_offload.plan.tape import RankTapes
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.pipeline import PeerLink, PipelineStep, RankStep
from pp_offload.simulate.schedules import PipelineOrder

WORTH_IT = 1e-3
"""Part of a step that another way must be able to save to be tried."""

NEARLY = 0.02
"""Ways whose short step is longer than the shortest by this part are dropped."""

BOUNDS = (1.0, 0.5, 0.0)
"""Parts of the bounds that an engine chooses by itself, see NOTE [ Which bounds ]. With the last
part one group at a time is in flight.
"""

Order = Callable[[RankTapes], list[Candidate]]
"""Function that sorts groups in the order in which they are chosen to stay."""

ORDERS: tuple[Order, ...] = (as_saved, spread_out, largest_first, first_saved)

NUM_IMPROVED = 4
"""Number of the best ways in which single groups are tried."""

FIGURES = (
    *("peak_bytes", "host_peak_bytes", "seconds", "busy_s", "stalled_s", "bytes_offloaded"),
    *("on_demand_reloads", "offload_s"),
)
"""Figures of a predicted step that are copied to the plan."""

SAME = 1e-6
"""Steps that differ by at most this part count as equal."""

Play = Callable[[Choice], Tried]
"""Function that predicts the step of a choice."""


class InfeasibleError(ValueError):
    """No choice of groups meets the limit.

    Attributes:
        least_bytes: Least limit for which a plan was found.
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
) -> OffloadPlan:
    """Make a plan whose peak is below the limit on each rank.

    Args:
        order, tapes, hardware, peers: As for :func:`predict`.
        limit_bytes: Limit of each device. The peak includes parameters and gradients, and the
            optimizer if the tapes have one, but no memory that an allocator cannot use.
        config: The options beside the plan, such as bounds. ``host_budget_bytes`` is the host
            memory of each rank; a group without room there stays.
        made_for: Model, schedule and device, in words, for readers of the file.

    Raises:
        InfeasibleError: The limit is too low even if all groups leave, and all layers that may be
            recomputed are.
        ValueError: The options choose groups that stay, or :func:`predict` refuses an argument.
    """
    chooser = Chooser(order, tapes, hardware, config=config, peers=peers)
    return chooser.plan(limit_bytes, made_for=made_for)


class Chooser:
    """Planner of one pipeline. Predictions for one limit are reused for the next.

    Args:
        order, tapes, hardware, config, peers: As for :func:`choose`.
    """

    def __init__(
        self,
        order: PipelineOrder,
        tapes: Sequence[RankTapes],
        hardware: Hardware,
        *,
        config: OffloadConfig | None = None,
        peers: PeerLink | None = None,
    ) -> None:
        config = config or OffloadConfig()
        self._predictor = Predictor(order, tapes, hardware, config, peers)

    def plan(self, limit_bytes: int, *, made_for: str = "") -> OffloadPlan:
        """Make a plan for a limit; see :func:`choose`."""
        check_count("limit_bytes", limit_bytes, unit="bytes")
        with collector_off():  # each step leaves a few MB in cycles, which take long to collect
            best = self._best(limit_bytes) or self._least
            if best.peak_bytes > limit_bytes:
                raise self._infeasible(limit_bytes)
        order = self._predictor.order
        options = options_of(
            self._predictor.config,
            num_microbatches=order.num_microbatches,
            schedule=order.schedule_name,
        )
        least_s = self.without_offload().seconds
        ranks = tuple(self._ranks_of(best))
        return OffloadPlan(made_for, limit_bytes, best.step.seconds, least_s, ranks, options)

    def _ranks_of(self, best: Tried) -> Iterator[RankPlan]:
        plans = self._predictor.plans_of(best.choice)
        tapes = self._predictor.tapes_of(nums_of(best.choice))
        for plan, step, tape in zip(plans, best.step.ranks, tapes, strict=True):
            in_flight, ahead = step.bounds
            yield replace(
                plan,
                **{name: getattr(step, name) for name in FIGURES},
                max_in_flight_bytes=in_flight,
                prefetch_bytes=ahead,
                recomputed=tape.recomputed,
                optimizer_bytes=tape.state_bytes,
            )

    def without_offload(self) -> PipelineStep:
        """Predict the step in which all groups stay and no layer is recomputed."""
        return self._predictor.without_offload(self._predictor.no_layers)

    def recomputed(self) -> PipelineStep | None:
        """Predict the step in which all layers are recomputed; None without such layers."""
        layers = self._predictor.all_layers
        return self._predictor.without_offload(layers) if any(layers) else None

    @property
    def least_limit_bytes(self) -> int:
        """Least limit for which a plan was found."""
        with collector_off():
            return self._least.peak_bytes

    def with_more_on_the_host(self, plan: OffloadPlan) -> OffloadPlan | None:
        """Make a plan for the same limit with unlimited host memory, if its step is shorter.

        If it is, ``host_budget_bytes`` is the limiting resource.
        """
        how, is_longer = self._predictor, _is_longer(plan.seconds, plan.least_seconds, WORTH_IT)
        if how.config.host_budget_bytes is None or not is_longer:
            return None
        config = replace(how.config, host_budget_bytes=None)
        roomier = Chooser(how.order, how.tapes, how.hardware, config=config, peers=how.peers)
        try:
            roomier_plan = roomier.plan(plan.limit_bytes, made_for=plan.made_for)
        except InfeasibleError:  # reloaded groups need room, too
            return None
        return roomier_plan if _is_longer(plan.seconds, roomier_plan.seconds, SAME) else None

    def _best(self, limit_bytes: int) -> Tried | None:
        """Return the shortest way that fits as an engine follows it; None if no way fits."""
        best = _Search(self._predictor, limit_bytes).best()
        if best is None and self._lowest.peak_bytes <= limit_bytes:
            return self._lowest
        return best

    @cached_property
    def _lowest(self) -> Tried:
        """Way with the lowest peak of those tried for any limit: all groups leave or stay, and no
        layers or all are recomputed; or each rank's choice with the lowest peak among these.
        """
        predictor = self._predictor
        corners = [
            predictor.short(choice_of(nums, _scaled(predictor.first_bounds, part), stays))
            for nums in (predictor.no_layers, predictor.all_layers)
            for part in BOUNDS
            for stays in (repeat(()), map(_places, predictor.tapes_of(nums)))
        ]
        corners.append(_Search(predictor, 0).mixed(corners))
        return predictor.proven(min(corners, key=lambda tried: tried.peak_bytes).choice)

    @cached_property
    def _least(self) -> Tried:
        """Way whose peak is the least limit for which a plan was found."""
        least = self._lowest
        while lower := self._best(least.peak_bytes - 1):
            least = lower
        return least

    def _infeasible(self, limit_bytes: int) -> InfeasibleError:
        """Make the error of a limit that cannot be met, with the least limit that can."""
        least = self._least.peak_bytes
        rank = [step.peak_bytes for step in self._least.step.ranks].index(least)
        state_bytes = self._predictor.tapes[rank].state_bytes
        of_that = f", {size_text(state_bytes)} of that for its optimizer's state"
        advice = "take more ranks, shorter microbatches or fewer in flight"
        if (host_bytes := self._predictor.config.host_budget_bytes) is not None:
            advice += (
                ", or, if groups stay for want of host memory, give a larger host_budget_bytes "
                f"than {host_bytes}"
            )
        return InfeasibleError(
            f"limit_bytes is {bytes_text(limit_bytes)}, expected at least "
            f"{bytes_text(least, is_least=True)}, which rank {rank} needs by any plan"
            f"{of_that if state_bytes else ''}; name more modules as groups, {advice}",
            least,
        )


# Plans for several limits


@dataclass(frozen=True)
class Front:
    """Plans by limit, and two steps without a plan."""

    plans: tuple[OffloadPlan, ...]
    """Least limit first. A larger limit is never slower."""

    without_offload: PipelineStep
    recomputed: PipelineStep | None
    """Step with all layers recomputed and no group offloaded; None without layers."""


def front(chooser: Chooser, *, num: int = 8, made_for: str = "") -> Front:
    """Make ``num`` plans for limits at equal distances, from the least that can be met to the peak
    without offload. For ``made_for`` see :func:`choose`.

    Raises:
        ValueError: ``num`` is below 2, or :func:`choose` raises.
    """
    check_count("num", num, least=2)
    without = chooser.without_offload()
    low, high = chooser.least_limit_bytes, peak_of(without)
    if low >= high:
        limits = [low]  # offload lowers no peak
    else:
        limits = [low + (high - low) * part // (num - 1) for part in range(num)]
    plans = [chooser.plan(limit, made_for=made_for) for limit in limits]
    return Front(tuple(_monotone(plans)), without, chooser.recomputed())


def _monotone(plans: Sequence[OffloadPlan]) -> list[OffloadPlan]:
    """Choose for each limit the fastest of all plans for this limit or a lower one."""
    best: list[OffloadPlan] = []
    for plan in plans:
        is_slower = bool(best) and best[-1].seconds < plan.seconds
        best.append(replace(best[-1], limit_bytes=plan.limit_bytes) if is_slower else plan)
    return best


def peak_of(step: PipelineStep | OffloadPlan) -> int:
    """Peak of the fullest rank, in bytes."""
    return max(rank.peak_bytes for rank in step.ranks)


class _Search:
    """Search of the best way for one limit."""

    def __init__(self, predictor: Predictor, limit_bytes: int) -> None:
        self._predictor, self._limit_bytes = predictor, limit_bytes

    def best(self) -> Tried | None:
        """Return the shortest way that fits as an engine follows it; None if no way fits."""
        predictor = self._predictor
        fitting = self._each_settled(self._ways(), predictor.short)
        if predictor.has_few and fitting and not self._is_enough(fitting[0]):
            improved = map(self._improved, fitting[:NUM_IMPROVED])
            fitting = sorted([*improved, *fitting[NUM_IMPROVED:]], key=lambda way: way.cost)
        shortest_s = fitting[0].step.seconds if fitting else 0.0
        nearly = [way for way in fitting if not _is_longer(way.step.seconds, shortest_s, NEARLY)]
        return self._best_proven(nearly) or self._best_proven(fitting[len(nearly) :])

    def _best_proven(self, ways: Sequence[Tried]) -> Tried | None:
        """Return the shortest of these ways in steps with all microbatches."""
        best: Tried | None = None
        for way in self._each_settled(ways, self._predictor.whole):
            if best is not None and best.cost <= way.cost:
                break
            proven = self._settled(way, self._predictor.proven)
            if proven is not None and (best is None or proven.cost < best.cost):
                best = proven
        return best

    def _each_settled(self, ways: Iterable[Tried], play: Play) -> list[Tried]:
        """Settle each way, and return those that fit, the shortest first."""
        settled = [self._settled(way, play) for way in ways]
        fitting = {id(way.step): way for way in settled if way is not None}  # each choice once
        return sorted(fitting.values(), key=lambda way: way.cost)

    def _settled(self, way: Tried, play: Play) -> Tried | None:
        """Take groups off ranks above the limit until all fit: first one, then two, four and so on.
        Return None if a rank is above the limit even if all groups leave.
        """
        choice, num = way.choice, 1
        while not self._fits(tried := play(choice)):
            less = tuple(
                old if self._fits(rank) else old._replace(stay=old.stay[:-num])
                for old, rank in zip(choice, tried.step.ranks, strict=True)
            )
            if less == choice:
                return None
            choice, num = less, 2 * num
        return tried

    def _fits(self, step: Tried | RankStep) -> bool:
        return step.peak_bytes <= self._limit_bytes

    def _best_of(self, ways: Sequence[Tried]) -> Tried:
        """Return the shortest way that fits; if none fits, the shortest of all."""
        return min(ways, key=lambda way: (not self._fits(way), way.cost))

    # Ways

    def _ways(self) -> list[Tried]:
        """Try ways, first without recomputed layers. Some may be above the limit."""
        predictor = self._predictor
        ways = self._filled(predictor.no_layers)
        best = self._best_of(ways)
        # Ranks that are above the limit if all groups stay may recompute their layers.
        without = predictor.without_offload(predictor.no_layers)
        needy = [not self._fits(rank) for rank in without.ranks]
        layers = tuple(map(mul, predictor.all_layers, needy))
        ranks = range(len(layers))
        single = (tuple(int(each == rank) for each in ranks) for rank in ranks if layers[rank])
        if not self._is_enough(best) and any(self._may_be_shorter(nums, best) for nums in single):
            ways += self._filled(self._enough(layers))
            ways.append(self._fill(layers, predictor.first_bounds, ORDERS[0]))
        return [*ways, self.mixed(ways)]

    def _filled(self, nums: Nums) -> list[Tried]:
        """Fill the ranks in each order, then within other bounds in the best order, or, with few
        groups, in each order again. The search ends at a way than which no plan can be much faster.
        """
        predictor, filled = self._predictor, list[Tried]()
        for order in ORDERS:
            filled.append(self._fill(nums, predictor.first_bounds, order))
            if self._is_enough(filled[-1]):
                return filled
        if AUTO not in (predictor.config.max_in_flight_bytes, predictor.config.prefetch_bytes):
            return filled
        order = ORDERS[filled.index(self._best_of(filled))]
        orders = ORDERS if predictor.has_few else (order,)
        for part in BOUNDS[1:]:
            bounds = _scaled(predictor.first_bounds, part)
            filled += [self._fill(nums, bounds, each) for each in orders]
        own = predictor.own_bounds(self._best_of(filled).choice)
        return [*filled, self._fill(nums, own, order)]

    def _is_enough(self, way: Tried) -> bool:
        """Whether no way with as many layers recomputed can be much better."""
        return not self._may_be_shorter(nums_of(way.choice), way)

    def _may_be_shorter(self, nums: Nums, way: Tried) -> bool:
        """Whether another way, with ``nums`` layers recomputed, may fit in place of one that does
        not, or be shorter; see NOTE [ No plan is faster ].
        """
        if not self._fits(way):
            return True
        least_s = self._predictor.without_offload(nums, is_short=True).seconds
        return _is_longer(way.step.seconds, least_s, WORTH_IT)

    def mixed(self, ways: Sequence[Tried]) -> Tried:
        """Combine for each rank its choice from the way in which the rank costs least."""

        def least(rank: int) -> RankChoice:
            best = min(ways, key=lambda way: self._cost(way.step.ranks[rank]))
            return best.choice[rank]

        return self._predictor.short(tuple(map(least, range(len(self._predictor.no_layers)))))

    def _improved(self, way: Tried) -> Tried:
        """Exchange a group on a rank, as long as that makes the step shorter."""
        while True:
            neighbours = map(self._predictor.short, self._neighbours(way.choice))
            best = self._best_of([way, *neighbours])
            if not _is_longer(way.step.seconds, best.step.seconds, SAME):
                return way
            way = best

    def _neighbours(self, choice: Choice) -> Iterator[Choice]:
        """Yield choices with one more group that stays, one less, or one exchanged."""
        for rank, tapes in enumerate(self._predictor.tapes_of(nums_of(choice))):
            stay = choice[rank].stay
            for out in (None, *stay):
                rest = tuple(place for place in stay if place != out)
                for more in ((), *((place,) for place in _places(tapes) if place not in stay)):
                    changed = choice[rank]._replace(stay=rest + more)
                    yield (*choice[:rank], changed, *choice[rank + 1 :])

    def _fill(self, nums: Nums, bounds: Sequence[Bounds], order: Order) -> Tried:
        """Keep as much on each rank as fits, as if other ranks did not change. Return the shortest
        way of the search: sometimes it keeps less than the last one.
        """
        fills = [Fill(order(tapes), self._limit_bytes) for tapes in self._predictor.tapes_of(nums)]
        ways = list[Tried]()
        while True:
            stays = [fill.stay for fill in fills]
            ways.append(self._predictor.short(choice_of(nums, bounds, stays)))
            if not any(fill.is_trying for fill in fills):
                return self._best_of(ways[::-1])
            for fill, rank in zip(fills, ways[-1].step.ranks, strict=True):
                if fill.is_trying:
                    fill.learn(rank.peak_bytes)

    def _enough(self, layers: Nums) -> Nums:
        """Search the number of layers that each rank recomputes, of at most ``layers``; see
        NOTE [ When to recompute ].
        """
        too_few = [-(not above) for above, _ in self._costs(self._predictor.no_layers)]
        enough, costs = [*layers], self._costs(layers)
        while any(most - few > 1 for few, most in zip(too_few, enough, strict=True)):
            trial = tuple((few + most + 1) // 2 for few, most in zip(too_few, enough, strict=True))
            for rank, cost in enumerate(self._costs(trial)):
                if cost > costs[rank]:
                    too_few[rank] = min(trial[rank], enough[rank] - 1)
                else:
                    enough[rank], costs[rank] = trial[rank], cost
        return tuple(enough)

    def _costs(self, nums: Nums) -> list[tuple[int, float]]:
        """Fill the ranks in one order, and return the costs of all ranks."""
        filled = self._fill(nums, self._predictor.first_bounds, ORDERS[0])
        return list(map(self._cost, filled.step.ranks))

    def _cost(self, rank: RankStep) -> tuple[int, float]:
        """Return a rank's bytes above the limit, and its seconds without waits for other ranks."""
        seconds = rank.seconds - sum(rank.waited_s.values())
        return max(0, rank.peak_bytes - self._limit_bytes), float(f"{seconds:.6e}")


def _places(tapes: RankTapes) -> tuple[Place, ...]:
    """List the places of all groups with something to move."""
    return tuple(group.place for group in as_saved(tapes))


def _scaled(bounds: Iterable[Bounds], part: float) -> list[Bounds]:
    """Scale both bounds, to at least 1: with 0 in flight compute would wait for each copy."""
    return [(max(1, int(part * flying)), max(1, int(part * ahead))) for flying, ahead in bounds]


def _is_longer(seconds: float, other_s: float, part: float) -> bool:
    """Whether a step is longer than another one, by ``part`` of itself at least."""
    return other_s < seconds * (1 - part)
