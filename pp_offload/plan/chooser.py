"""What each rank keeps, sends away and recomputes, so that no device's peak is above a limit.

    plan = choose(order, tapes, DEVICES["H100"], 40 * 2**30)
    plan.save("plan.json")

    chooser = Chooser(order, tapes, DEVICES["H100"])
    chooser.plan(40 * 2**30), chooser.plan(30 * 2**30)  # the second one takes less time

NOTE [ When to recompute ]
    What is recomputed takes time in any case, and what leaves only where the link has too much to
    do. So all is planned without recomputation first, and no more where that is about as fast as
    without any offload. Else the ranks that are above the limit without it recompute a quarter of
    their layers, a half, and so on, and what was the best of these is changed rank by rank. A
    number of layers is passed over where the step is too long even if everything stayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from pp_offload._common.checks import check_count
from pp_offload._common.garbage import collector_off
from pp_offload._common.offload_plan import OffloadPlan, RankPlan
from pp_offload._groups.plan_options import options_of
from pp_offload.config import OffloadConfig
from pp_offload.plan.search import InfeasibleError, Search
from pp_offload.plan.steps import SAME, Steps, Tried, most_tries
from pp_offload.plan.tape import RankTapes
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.messages import PeerLink
from pp_offload.simulate.orders import PipelineOrder
from pp_offload.simulate.rank import PipelineStep

PARTS = 4
"""Layers are recomputed in such parts at first."""

WORTH_IT = 1e-3
"""Other numbers are tried where they could save such a part of a step."""

Nums = tuple[int, ...]
"""How many layers each rank recomputes."""


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
        self._searches: dict[Nums, Search] = {}

    def plan(self, limit_bytes: int, *, made_for: str = "") -> OffloadPlan:
        """See :func:`choose`."""
        check_count("limit_bytes", limit_bytes, unit="bytes")
        # Each step leaves a few MB in cycles. To look for them after each one takes long, for that
        # looks at all that is kept of first steps too; and where steps are large, few are tried.
        with collector_off():
            best = self._best(limit_bytes)
        search, tried = self._search(best.nums), best.tried
        ranks = [
            RankPlan(
                stages=stages,
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
            for stages, one, tapes in zip(
                search.stages(tried.kept), tried.step.ranks, search.tapes, strict=True
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

    def needed_at_first(self, limit_bytes: int) -> dict[int, int]:
        """Ranks that only the first step has recompute layers; and how many bytes it needs without.

        All groups leave in it, whatever is planned, and bounds are not chosen yet. Later steps are
        below the limit there where all groups leave.
        """
        search = self._search(self._nothing)
        above = {rank: peak for rank, peak in enumerate(search.first_peaks) if peak > limit_bytes}
        later = search.all_leave().ranks if above else []
        return {rank: peak for rank, peak in above.items() if later[rank].peak_bytes <= limit_bytes}

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
        return self._search(nums).without_offload if any(nums) else None

    @property
    def _nothing(self) -> Nums:
        return (0,) * len(self._tapes)

    def _best(self, limit_bytes: int) -> _Found:
        most_steps = self._steps.num + self._steps.max_tries
        trial = _Trial(self._steps, self._search, limit_bytes, most_steps)
        trial.take(self._nothing)
        needy = self._needy(limit_bytes)
        if needy and not trial.is_good:
            ranks = range(len(self._tapes))
            for part in range(1, PARTS + 1):
                trial.take(tuple(-(-needy.get(rank, 0) * part // PARTS) for rank in ranks))
            trial.descend(needy)
        best = trial.best()
        tried = self._search(best.nums).polished(best.tried, limit_bytes, most_steps)
        return _Found(best.nums, tried)

    def _needy(self, limit_bytes: int) -> dict[int, int]:
        """Ranks that are above the limit where all stays, or where all leaves, as in the first
        step; and how many layers they have.
        """
        search = self._search(self._nothing)
        stays = [rank.peak_bytes for rank in search.without_offload.ranks]
        return {
            rank: self._tapes[rank].num_layers
            for rank, peaks in enumerate(zip(stays, search.first_peaks, strict=True))
            if max(peaks) > limit_bytes and self._tapes[rank].num_layers
        }

    def _search(self, nums: Nums) -> Search:
        if nums not in self._searches:
            tapes = [one.recomputing(num) for one, num in zip(self._tapes, nums, strict=True)]
            self._searches[nums] = Search(self._steps, tapes)
        return self._searches[nums]


@dataclass(frozen=True)
class _Found:
    """A choice that fits."""

    nums: Nums
    tried: Tried

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.tried.step.seconds


class _Trial:
    """Numbers of layers that are tried for one limit, and the best of them. See NOTE [ When to
    recompute ].
    """

    def __init__(
        self,
        steps: Steps,
        search_of: Callable[[Nums], Search],
        limit_bytes: int,
        most_steps: int,
    ) -> None:
        self._steps = steps
        self._search_of = search_of
        self._limit_bytes = limit_bytes
        self._most_steps = most_steps
        self._taken: set[Nums] = set()
        self._refused: list[Search] = []
        self._best: _Found | None = None

    @property
    def is_good(self) -> bool:
        """Whether the best is about as fast as its number of layers could be."""
        best = self._best
        if best is None:
            return False
        return not _is_worth(self._search_of(best.nums).without_offload.seconds, best.seconds)

    def take(self, nums: Nums) -> bool:
        """Try them; whether they are better than all others."""
        if nums in self._taken:
            return False
        self._taken.add(nums)
        search, best = self._search_of(nums), self._best
        if best is not None and not _is_worth(search.without_offload.seconds, best.seconds):
            return False
        if max(search.first_peaks) > self._limit_bytes:
            self._refused.append(search)
            return False
        try:
            found = _Found(nums, search.found(self._limit_bytes, self._most_steps))
        except InfeasibleError:
            self._refused.append(search)
            return False
        if best is None or _is_shorter(found.seconds, best.seconds):
            self._best = found
            return True
        return False

    def descend(self, layers: Mapping[int, int]) -> None:
        """Change the best rank by rank, for as long as that helps and there is time.

        By a part at most first, for that is how far apart those are of which it is the best. By
        more where that helps no longer.

        Args:
            layers: How many each rank has, of those that may have some recomputed.
        """
        most = max(layers.values())
        part = max(1, most // PARTS)
        fine, coarse = list(_halved(part)), [step for step in _halved(most) if step > part]
        is_better = True
        while is_better:
            for step in fine:
                while self._change(layers, step):
                    pass
            is_better = any(self._change(layers, step) for step in coarse)

    def _change(self, layers: Mapping[int, int], step: int) -> bool:
        """Change the best on one rank by so many layers; whether that is better."""
        if self._best is None:
            return False
        near = _near(self._best.nums, layers, step)
        return any(self.take(nums) for nums in takewhile(lambda _: self._has_time(), near))

    def _has_time(self) -> bool:
        return self._steps.num < self._most_steps

    def best(self) -> _Found:
        """The best so far.

        Raises:
            InfeasibleError: There is none.
        """
        if self._best is None:
            raise self._infeasible()
        return self._best

    def _infeasible(self) -> InfeasibleError:
        """With the least limit that any of those that were tried can meet."""
        least: InfeasibleError | None = None
        for search in sorted(self._refused, key=lambda one: max(one.first_peaks)):
            if least is not None and max(search.first_peaks) >= least.least_bytes:
                break  # nor can the others, whose first step needs as much
            found = search.infeasible(self._limit_bytes)
            if least is None or found.least_bytes < least.least_bytes:
                least = found
        assert least is not None, "all that were tried are refused"
        return least


def _halved(num: int) -> Iterator[int]:
    """It, half of it and so on, down to 1."""
    while num:
        yield num
        num //= 2


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
