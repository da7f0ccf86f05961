"""Choose what each rank keeps, sends away and recomputes, so that no peak is above a limit.

    plan = choose(order, tapes, DEVICES["H100"], 40 * 2**30)
    plan.save("plan.json")

    chooser = Chooser(order, tapes, DEVICES["H100"])
    chooser.plan(40 * 2**30), chooser.plan(30 * 2**30)  # tapes are recorded once

A plan is the best of a few ways: each rank keeps as much as fits, in four orders, within three
sizes of bounds, with and without recomputed layers. A single way may be several times too slow, but
the best of all ways is near the optimum (benchmarks/results/plan_search.txt). The chosen plan was
predicted as an engine follows it from its first step on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pp_offload._common.checks import check_count
from pp_offload._common.offload_plan import OffloadPlan
from pp_offload._common.processes import collector_off
from pp_offload._common.text import bytes_text, size_text
from pp_offload._groups.plan import options_of
from pp_offload.config import OffloadConfig
from pp_offload.plan.pipeline import Predictor, Tried, peak_of
from pp_offload.plan.search import SAME, WORTH_IT, Search, is_longer, lowest
from pp_offload.plan.tape import RankTapes
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.pipeline import PeerLink, PipelineStep
from pp_offload.simulate.schedules import PipelineOrder

FIGURES = (  # of a predicted step, which are copied to the plan
    *("peak_bytes", "host_peak_bytes", "seconds", "busy_s", "stalled_s", "bytes_offloaded"),
    *("on_demand_reloads", "offload_s"),
)


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
        self._predictor = Predictor(order, tapes, hardware, config or OffloadConfig(), peers)

    def plan(self, limit_bytes: int, *, made_for: str = "") -> OffloadPlan:
        """Make a plan for a limit; see :func:`choose`."""
        check_count("limit_bytes", limit_bytes, unit="bytes")
        with collector_off():  # each step leaves a few MB in cycles, which take long to collect
            best = self._best(limit_bytes) or self._least
            if best.peak_bytes > limit_bytes:
                raise self._infeasible(limit_bytes)
        ranks = []
        for plan, step in zip(self._predictor.plans_of(best.choice), best.step.ranks, strict=True):
            figures = {name: getattr(step, name) for name in FIGURES}
            figures["max_in_flight_bytes"], figures["prefetch_bytes"] = step.bounds
            ranks.append(replace(plan, **figures))
        num, name = self._predictor.order.num_microbatches, self._predictor.order.schedule_name
        options = options_of(self._predictor.config, num_microbatches=num, schedule=name)
        least_s = self.without_offload().seconds
        return OffloadPlan(made_for, limit_bytes, best.step.seconds, least_s, tuple(ranks), options)

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
        how, least_s = self._predictor, plan.least_seconds
        if how.config.host_budget_bytes is None or not is_longer(plan.seconds, least_s, WORTH_IT):
            return None
        config = replace(how.config, host_budget_bytes=None)
        roomier = Chooser(how.order, how.tapes, how.hardware, config=config, peers=how.peers)
        try:
            roomier_plan = roomier.plan(plan.limit_bytes, made_for=plan.made_for)
        except InfeasibleError:  # reloaded groups need room, too
            return None
        return roomier_plan if is_longer(plan.seconds, roomier_plan.seconds, SAME) else None

    def _best(self, limit_bytes: int) -> Tried | None:
        """Return the shortest way that fits as an engine follows it; None if no way fits."""
        best = Search(self._predictor, limit_bytes).best()
        if best is None and self._lowest.peak_bytes <= limit_bytes:
            return self._lowest
        return best

    @cached_property
    def _lowest(self) -> Tried:
        return lowest(self._predictor)

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
    plans: list[OffloadPlan] = []
    for limit in limits:
        plan = chooser.plan(limit, made_for=made_for)
        if plans and plans[-1].seconds < plan.seconds:  # then a lower limit has the better plan
            plan = replace(plans[-1], limit_bytes=limit)
        plans.append(plan)
    return Front(tuple(plans), without, chooser.recomputed())
