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

NOTE [ Short steps ]
    A schedule of many microbatches has as many in flight as one with twice as many microbatches as
    ranks, so the peaks are equal. Ways are tried on such a short step. The ways with nearly the
    shortest step are then tried with all microbatches.

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
    stay. So the best order, or each order if groups are few, is also tried within parts of these
    bounds; and the best order within the bounds that an engine would choose for the groups that
    leave in the best way so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from pp_offload._common.checks import check_count
from pp_offload._common.garbage import collector_off
from pp_offload._common.offload_plan import OffloadPlan, RankPlan
from pp_offload._common.sizes import bytes_text, size_text
from pp_offload._groups.plan_options import options_of
from pp_offload.config import AUTO, OffloadConfig, without_plan
from pp_offload.plan.fills import (
    Candidate,
    Fill,
    Place,
    as_saved,
    first_saved,
    largest_first,
    spread_out,
)
from pp_offload.plan.pipeline import check_smallest, predict_each
from pp_offload.plan.tape import RankTapes
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.messages import PeerLink
from pp_offload.simulate.rank import PipelineStep, RankStep
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

FEW = 12
"""Most groups of all ranks for which each order is tried within all bounds, and each group alone:
of many groups, a single one makes no difference.
"""

NUM_IMPROVED = 4
"""Number of the best ways in which single groups are tried."""

NUM_PROVEN = 4
"""Number of steps that are predicted before a plan is returned: the first step, in which an
optimizer has no state yet, and later ones, which earlier steps could influence.
"""

FIGURES = (
    *("peak_bytes", "host_peak_bytes", "seconds", "busy_s", "stalled_s", "bytes_offloaded"),
    *("on_demand_reloads", "offload_s"),
)
"""Figures of a predicted step that are copied to the plan."""

SAME = 1e-6
"""Steps that differ by at most this part count as equal."""

Nums = Mapping[int, int]
"""Number of layers that ranks recompute; ranks that are not in it recompute none."""

Bounds = tuple[int, int]
"""Bounds on bytes in flight, and on bytes ahead."""


class InfeasibleError(ValueError):
    """No choice of groups meets the limit.

    Attributes:
        least_bytes: Least limit for which a plan was found.
    """

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class RankChoice(NamedTuple):
    """Choice of a rank: layers recomputed, bounds, and groups that stay."""

    num_recomputed: int
    """Number of layers that the rank recomputes."""

    bounds: Bounds | None
    """Bounds of the rank; None if the engine is to choose them."""

    stay: tuple[Place, ...]
    """Places of the groups that stay, in the order in which they were chosen."""


Choice = tuple[RankChoice, ...]
"""Choices of all ranks."""


@dataclass(frozen=True)
class Tried:
    """A choice, and the predicted step."""

    choice: Choice
    step: PipelineStep

    @property
    def peak_bytes(self) -> int:
        """Peak of the fullest rank."""
        return max(rank.peak_bytes for rank in self.step.ranks)

    @property
    def cost(self) -> tuple[float, int]:
        """Rounded time of the step; among equal times, the bytes that leave decide."""
        digits = float(f"{self.step.seconds:.6e}")
        return digits, sum(rank.bytes_offloaded for rank in self.step.ranks)


Play = Callable[[Choice], Tried]
"""Function that predicts the step of a choice."""


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
        progress: Function called before each predicted step with the number of steps so far.
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
        self._order, self._tapes, self._hardware = order, tapes, hardware
        num_groups = sum(len(as_saved(rank)) for rank in tapes)
        self._has_few = num_groups <= FEW
        self._short = order if self._has_few else order.shortened()
        self._all_layers: Nums = {n: rank.num_layers for n, rank in enumerate(tapes)}
        self._config = config or OffloadConfig()
        self._peers, self._progress = peers, progress
        self._num_predicted = 0
        self._without: dict[Any, PipelineStep] = {}
        self._played: dict[Any, list[PipelineStep]] = {}
        check_smallest(tapes, self._config)

    def plan(self, limit_bytes: int, *, made_for: str = "") -> OffloadPlan:
        """Make a plan for a limit; see :func:`choose`."""
        check_count("limit_bytes", limit_bytes, unit="bytes")
        with collector_off():  # each step leaves a few MB in cycles, which take long to collect
            best = self._best(limit_bytes) or self._least
            if best.peak_bytes > limit_bytes:
                raise self._infeasible(limit_bytes)
        options = options_of(
            self._config,
            num_microbatches=self._order.num_microbatches,
            schedule=self._order.schedule_name,
        )
        least_s = self.without_offload().seconds
        ranks = tuple(self._ranks_of(best))
        return OffloadPlan(made_for, limit_bytes, best.step.seconds, least_s, ranks, options)

    def _ranks_of(self, best: Tried) -> Iterator[RankPlan]:
        plans, tapes = self._plans(best.choice), self._tapes_of(best.choice)
        for plan, step, tape in zip(plans, best.step.ranks, tapes, strict=True):
            in_flight, ahead = step.bounds
            yield replace(
                plan,
                **{name: getattr(step, name) for name in FIGURES},
                max_in_flight_bytes=in_flight,
                prefetch_bytes=ahead,
                recomputed=tape.recomputed,
                optimizer_bytes=tape.update.state_bytes,
            )

    def without_offload(self) -> PipelineStep:
        """Predict the step in which all groups stay and no layer is recomputed."""
        return self._without_offload(self._order, {})

    def recomputed(self) -> PipelineStep | None:
        """Predict the step in which all layers are recomputed; None without such layers."""
        layers = self._all_layers
        return self._without_offload(self._order, layers) if any(layers.values()) else None

    @property
    def least_limit_bytes(self) -> int:
        """Least limit for which a plan was found."""
        with collector_off():
            return self._least.peak_bytes

    def with_more_on_the_host(self, plan: OffloadPlan) -> OffloadPlan | None:
        """Make a plan for the same limit with unlimited host memory, if its step is shorter.

        If it is, ``host_budget_bytes`` is the limiting resource.
        """
        is_longer = _is_longer(plan.seconds, plan.least_seconds, WORTH_IT)
        if self._config.host_budget_bytes is None or not is_longer:
            return None
        config = replace(self._config, host_budget_bytes=None)
        how = self._order, self._tapes, self._hardware
        roomier = Chooser(*how, config=config, peers=self._peers, progress=self._progress)
        try:
            roomier_plan = roomier.plan(plan.limit_bytes, made_for=plan.made_for)
        except InfeasibleError:  # reloaded groups need room, too
            return None
        return roomier_plan if _is_longer(plan.seconds, roomier_plan.seconds, SAME) else None

    # Ways

    def _best(self, limit_bytes: int) -> Tried | None:
        """Return the shortest way that fits as an engine follows it; None if no way fits."""
        fitting = self._each_settled(self._ways(limit_bytes), limit_bytes, self._try)
        if self._has_few and fitting and not self._is_enough(fitting[0], limit_bytes):
            improved = [self._improved(way, limit_bytes) for way in fitting[:NUM_IMPROVED]]
            fitting = sorted([*improved, *fitting[NUM_IMPROVED:]], key=lambda way: way.cost)
        shortest_s = fitting[0].step.seconds if fitting else 0.0
        nearly = [way for way in fitting if not _is_longer(way.step.seconds, shortest_s, NEARLY)]
        best = self._best_proven(nearly, limit_bytes)
        best = best or self._best_proven(fitting[len(nearly) :], limit_bytes)
        if best is None and self._lowest.peak_bytes <= limit_bytes:
            return self._lowest
        return best

    def _best_proven(self, ways: Sequence[Tried], limit_bytes: int) -> Tried | None:
        """Return the shortest of these ways in steps with all microbatches."""
        best: Tried | None = None
        for way in self._each_settled(ways, limit_bytes, self._try_whole):
            if best is not None and best.cost <= way.cost:
                break
            proven = self._settled(way, limit_bytes, self._prove)
            if proven is not None and (best is None or proven.cost < best.cost):
                best = proven
        return best

    def _each_settled(self, ways: Iterable[Tried], limit_bytes: int, play: Play) -> list[Tried]:
        """Settle each way, and return those that fit, the shortest first."""
        settled = [self._settled(way, limit_bytes, play) for way in ways]
        fitting = {id(way.step): way for way in settled if way is not None}  # each choice once
        return sorted(fitting.values(), key=lambda way: way.cost)

    def _settled(self, way: Tried, limit_bytes: int, play: Play) -> Tried | None:
        """Take groups off ranks above the limit until all fit: first one, then two, four and so on.
        Return None if a rank is above the limit even if all groups leave.
        """
        choice, num = way.choice, 1
        while (tried := play(choice)).peak_bytes > limit_bytes:
            less = tuple(
                old._replace(stay=old.stay[:-num]) if rank.peak_bytes > limit_bytes else old
                for old, rank in zip(choice, tried.step.ranks, strict=True)
            )
            if less == choice:
                return None
            choice, num = less, 2 * num
        return tried

    def _ways(self, limit_bytes: int) -> list[Tried]:
        """Try ways, first without recomputed layers. Some may be above the limit."""
        ways = self._filled({}, limit_bytes)
        layers = self._layers_of_needy(limit_bytes)
        if self._may_recompute(layers, _best_of(ways, limit_bytes), limit_bytes):
            ways += self._filled(self._enough(layers, limit_bytes), limit_bytes)
            ways.append(self._first_fill(layers, limit_bytes))
        return [*ways, self._mixed(ways, limit_bytes)]

    def _filled(self, nums: Nums, limit_bytes: int) -> list[Tried]:
        """Fill the ranks in each order, then in the best order within other bounds. The search ends
        at a way than which no plan can be much faster.
        """
        filled = list[Tried]()
        for order in ORDERS:
            filled.append(self._fill(nums, self._first_bounds, order, limit_bytes))
            if self._is_enough(filled[-1], limit_bytes):
                return filled
        if AUTO not in (self._config.max_in_flight_bytes, self._config.prefetch_bytes):
            return filled
        order = ORDERS[filled.index(_best_of(filled, limit_bytes))]
        for part in BOUNDS[1:]:
            bounds = [_scaled(both, part) for both in self._first_bounds]
            for each in ORDERS if self._has_few else [order]:
                filled.append(self._fill(nums, bounds, each, limit_bytes))
        own = self._own_bounds(_best_of(filled, limit_bytes).choice)
        return [*filled, self._fill(nums, own, order, limit_bytes)]

    def _is_enough(self, way: Tried, limit_bytes: int) -> bool:
        """Whether a way fits, and no way with as many layers recomputed can be much faster."""
        fits = way.peak_bytes <= limit_bytes
        return fits and not self._may_be_shorter(_nums_of(way.choice), way)

    def _may_be_shorter(self, nums: Nums, way: Tried) -> bool:
        """Whether a step may be shorter with ``nums`` layers recomputed, see NOTE [ No plan is
        faster ].
        """
        least_s = self._without_offload(self._short, nums).seconds
        return _is_longer(way.step.seconds, least_s, WORTH_IT)

    def _may_recompute(self, layers: Nums, best: Tried, limit_bytes: int) -> bool:
        """Whether a single recomputed layer on some rank may make a step shorter than the best."""
        if best.peak_bytes > limit_bytes:
            return bool(layers)
        if self._is_enough(best, limit_bytes):  # no layer has to be recorded anew
            return False
        return any(self._may_be_shorter({rank: 1}, best) for rank in layers)

    def _mixed(self, ways: Sequence[Tried], limit_bytes: int) -> Tried:
        """Combine for each rank its choice from the way in which the rank costs least."""

        def least(rank: int) -> RankChoice:
            best = min(ways, key=lambda way: _cost(way.step.ranks[rank], limit_bytes))
            return best.choice[rank]

        return self._try(tuple(map(least, range(len(self._tapes)))))

    def _improved(self, way: Tried, limit_bytes: int) -> Tried:
        """Exchange a group on a rank, as long as that makes the step shorter."""
        while True:
            best = _best_of([way, *map(self._try, self._neighbours(way.choice))], limit_bytes)
            if not _is_longer(way.step.seconds, best.step.seconds, SAME):
                return way
            way = best

    def _neighbours(self, choice: Choice) -> Iterator[Choice]:
        """Yield choices with one more group that stays, one less, or one exchanged."""
        for rank, places in enumerate(_everything(self._tapes_of(choice))):
            stay = choice[rank].stay
            for out in (None, *stay):
                rest = tuple(place for place in stay if place != out)
                for more in ((), *((place,) for place in places if place not in stay)):
                    changed = choice[rank]._replace(stay=rest + more)
                    yield (*choice[:rank], changed, *choice[rank + 1 :])

    def _own_bounds(self, choice: Choice) -> list[Bounds]:
        """Return the bounds that an engine would choose for the groups that leave."""
        free = tuple(rank._replace(bounds=None) for rank in choice)
        return [rank.bounds for rank in self._steps(self._short, free, 2, has_state=True)[-1].ranks]

    def _fill(self, nums: Nums, bounds: Sequence[Bounds], order: Order, limit_bytes: int) -> Tried:
        """Keep as much on each rank as fits, as if other ranks did not change. Return the shortest
        way of the search: sometimes it keeps less than the last one.
        """
        fills = [Fill(order(tapes), limit_bytes) for tapes in self._recomputing(nums)]
        ways = list[Tried]()
        while not ways or any(fill.is_trying for fill in fills):
            if ways:
                for fill, rank in zip(fills, ways[-1].step.ranks, strict=True):
                    if fill.is_trying:
                        fill.learn(rank.peak_bytes)
            ways.append(self._try(_choice(nums, bounds, [fill.stay for fill in fills])))
        return _best_of(ways[::-1], limit_bytes)

    def _first_fill(self, nums: Nums, limit_bytes: int) -> Tried:
        return self._fill(nums, self._first_bounds, ORDERS[0], limit_bytes)

    def _enough(self, layers: Nums, limit_bytes: int) -> Nums:
        """Search the number of layers that each rank recomputes; see NOTE [ When to recompute ].

        Args:
            layers: Number of layers of each rank that may recompute some.
        """
        ranks = self._first_fill({}, limit_bytes).step.ranks
        too_few = {rank: -(ranks[rank].peak_bytes <= limit_bytes) for rank in layers}
        enough = dict(layers)
        ranks = self._first_fill(layers, limit_bytes).step.ranks
        costs = {rank: _cost(ranks[rank], limit_bytes) for rank in layers}
        while any(enough[rank] - too_few[rank] > 1 for rank in layers):
            trial = {rank: (too_few[rank] + enough[rank] + 1) // 2 for rank in layers}
            ranks = self._first_fill(trial, limit_bytes).step.ranks
            for rank, num in trial.items():
                cost = _cost(ranks[rank], limit_bytes)
                if cost > costs[rank]:
                    too_few[rank] = min(num, enough[rank] - 1)
                else:
                    enough[rank], costs[rank] = num, cost
        return enough

    def _layers_of_needy(self, limit_bytes: int) -> dict[int, int]:
        """Return the number of layers of each rank that is above the limit if all groups stay."""
        return {
            rank: self._tapes[rank].num_layers
            for rank, step in enumerate(self.without_offload().ranks)
            if step.peak_bytes > limit_bytes and self._tapes[rank].num_layers
        }

    @cached_property
    def _first_bounds(self) -> list[Bounds]:
        """Bounds that an engine chooses if all groups leave."""
        config = without_plan(self._config)
        last = self._predicted(self._short, self._tapes, config, 2)[-1]
        return [rank.bounds for rank in last.ranks]

    # The least limit

    @cached_property
    def _lowest(self) -> Tried:
        """Way with the lowest peak of those tried for any limit: all groups leave or stay, and no
        layers or all are recomputed; or each rank's choice with the lowest peak among these.
        """
        corners = [
            self._try(_choice(nums, [_scaled(both, part) for both in self._first_bounds], stays))
            for nums in ({}, self._all_layers)
            for part in BOUNDS
            for stays in (((),) * len(self._tapes), _everything(self._recomputing(nums)))
        ]
        mixed = tuple(
            min(corners, key=lambda tried: tried.step.ranks[rank].peak_bytes).choice[rank]
            for rank in range(len(self._tapes))
        )
        corners.append(self._try(mixed))
        return self._prove(min(corners, key=lambda tried: tried.peak_bytes).choice)

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
        state_bytes = self._tapes[rank].update.state_bytes
        of_that = f", {size_text(state_bytes)} of that for its optimizer's state"
        advice = "take more ranks, shorter microbatches or fewer in flight"
        if (host_bytes := self._config.host_budget_bytes) is not None:
            advice += (
                ", or, if groups stay for want of host memory, give a larger host_budget_bytes "
                f"than {host_bytes}"
            )
        return InfeasibleError(
            f"limit_bytes is {bytes_text(limit_bytes)}, expected at least "
            f"{bytes_text(least, is_least=True)}, which rank {rank} needs even if all groups leave"
            f"{of_that if state_bytes else ''}; name more modules as groups, {advice}",
            least,
        )

    # Predicted steps

    def _without_offload(self, order: PipelineOrder, nums: Nums) -> PipelineStep:
        """Predict the step in which all groups stay; the second if an optimizer has a state."""
        tapes = self._recomputing(nums)
        key = order.num_microbatches, tuple(nums.get(rank, 0) for rank in range(len(tapes)))
        if key not in self._without:
            num_steps = 1 + any(rank.update.state_bytes for rank in tapes)
            self._without[key] = self._predicted(order, tapes, None, num_steps)[-1]
        return self._without[key]

    def _try(self, choice: Choice) -> Tried:
        """Predict a short step by a choice."""
        return Tried(choice, *self._steps(self._short, choice, 1, has_state=True))

    def _try_whole(self, choice: Choice) -> Tried:
        return Tried(choice, *self._steps(self._order, choice, 1, has_state=True))

    def _prove(self, choice: Choice) -> Tried:
        """Predict steps by a choice from the first on; return the last with the highest peaks."""
        steps = self._steps(self._order, choice, NUM_PROVEN, has_state=False)
        peaks = zip(*([rank.peak_bytes for rank in step.ranks] for step in steps), strict=True)
        last = zip(steps[-1].ranks, map(max, peaks), strict=True)
        return Tried(choice, PipelineStep([replace(rank, peak_bytes=peak) for rank, peak in last]))

    def _steps(
        self, order: PipelineOrder, choice: Choice, num: int, *, has_state: bool
    ) -> list[PipelineStep]:
        """Predict steps by a choice from the first one on; each choice is predicted once."""
        ranks = tuple((rank.num_recomputed, rank.bounds, frozenset(rank.stay)) for rank in choice)
        key = order.num_microbatches, ranks, num, has_state
        if key not in self._played:
            plan = OffloadPlan("", 0, 0.0, 0.0, tuple(self._plans(choice)))
            config = replace(without_plan(self._config), plan=plan)
            tapes = self._tapes_of(choice)
            self._played[key] = self._predicted(order, tapes, config, num, has_state=has_state)
        return self._played[key]

    def _plans(self, choice: Choice) -> Iterator[RankPlan]:
        for rank, tapes in zip(choice, self._tapes_of(choice), strict=True):
            in_flight, ahead = rank.bounds or (None, None)
            groups = tapes.planned(frozenset(rank.stay))
            yield RankPlan(groups, max_in_flight_bytes=in_flight, prefetch_bytes=ahead)

    def _tapes_of(self, choice: Choice) -> list[RankTapes]:
        return self._recomputing(_nums_of(choice))

    def _recomputing(self, nums: Nums) -> list[RankTapes]:
        return [tapes.recomputing(nums.get(rank, 0)) for rank, tapes in enumerate(self._tapes)]

    def _predicted(
        self,
        order: PipelineOrder,
        tapes: Sequence[RankTapes],
        config: OffloadConfig | None,
        num_steps: int,
        *,
        has_state: bool = False,
    ) -> list[PipelineStep]:
        if self._progress is not None:
            self._progress(self._num_predicted)
        self._num_predicted += 1
        how = order, tapes, self._hardware, config, self._peers
        return predict_each(*how, num_steps, has_state=has_state)


def _everything(tapes: Iterable[RankTapes]) -> list[tuple[Place, ...]]:
    """List the places of all groups with something to move, by rank."""
    return [tuple(group.place for group in as_saved(rank)) for rank in tapes]


def _best_of(ways: Sequence[Tried], limit_bytes: int) -> Tried:
    """Return the shortest way that fits; if none fits, the shortest of all."""
    return min(ways, key=lambda way: (way.peak_bytes > limit_bytes, way.cost))


def _choice(nums: Nums, bounds: Sequence[Bounds], stays: Iterable[tuple[Place, ...]]) -> Choice:
    both = enumerate(zip(bounds, stays, strict=True))
    return tuple(RankChoice(nums.get(rank, 0), *of_rank) for rank, of_rank in both)


def _nums_of(choice: Choice) -> Nums:
    return {rank: each.num_recomputed for rank, each in enumerate(choice)}


def _scaled(bounds: Bounds, part: float) -> Bounds:
    """Scale both bounds, to at least 1: with 0 in flight compute would wait for each copy."""
    in_flight, ahead = (max(1, int(part * nbytes)) for nbytes in bounds)
    return in_flight, ahead


def _cost(rank: RankStep, limit_bytes: int) -> tuple[int, float]:
    """Return a rank's bytes above the limit, and its seconds without waits for other ranks."""
    seconds = rank.seconds - sum(rank.waited_s.values())
    return max(0, rank.peak_bytes - limit_bytes), float(f"{seconds:.6e}")


def _is_longer(seconds: float, other_s: float, part: float) -> bool:
    """Whether a step is longer than another one, by ``part`` of itself at least."""
    return other_s < seconds * (1 - part)
