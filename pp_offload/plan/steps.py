"""Steps that are predicted for a plan: how many there is time for, and which is best.

steps = Steps(order, hardware, config, peers, progress, most_tries(order, tapes))
first = steps.first(tapes)
tried = Tried(kept, steps.planned(first, ranks))
best_of([tried, ...])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pp_offload._common.offload_plan import OffloadPlan, RankPlan
from pp_offload.config import OffloadConfig, without_plan
from pp_offload.plan.changes import Stay
from pp_offload.plan.pipeline import FirstStep, predict, predict_each
from pp_offload.plan.tape import RankTapes
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.messages import PeerLink
from pp_offload.simulate.orders import PipelineOrder
from pp_offload.simulate.rank import PipelineStep, RankStep

MAX_EVENTS = 2_000_000
"""How many events of tapes are played for a plan, about: some seconds of a core."""

MAX_TRIES = 512
"""No more steps are tried for a plan, however short they are."""

NUM_FOLLOWED = 4
"""Steps that are played by a plan before it is given: the first one, in which an optimizer has no
state yet, and some in which what is kept from step to step could make a difference.
"""

SAME = 1e-6
"""Steps are as short as each other up to this part of them."""


@dataclass
class Steps:
    """Predicts steps of one pipeline, and tells how many."""

    order: PipelineOrder
    hardware: Hardware
    config: OffloadConfig
    """The options beside the plan."""

    peers: PeerLink | None
    progress: Callable[[int], None] | None
    max_tries: int
    """For a plan, where they are not needed to find one at all."""

    num: int = 0
    """Predicted so far."""

    def without_offload(self, tapes: Sequence[RankTapes]) -> PipelineStep:
        """The step in which all stays; a later one than the first, if an optimizer has a state."""
        self._count()
        num_steps = 1 + any(one.update.state_bytes for one in tapes)
        return predict(self.order, tapes, self.hardware, peers=self.peers, num_steps=num_steps)

    def first(self, tapes: Sequence[RankTapes]) -> FirstStep:
        """A first step by no plan, in which all groups leave. What is tried comes after it."""
        self._count()
        return FirstStep(self.order, tapes, self.hardware, self.config, self.peers)

    def planned(self, first: FirstStep, ranks: Sequence[RankPlan]) -> PipelineStep:
        """A step by a plan."""
        self._count()
        plan = OffloadPlan("", 0, 0.0, 0.0, tuple(ranks))
        return first.second(replace(without_plan(self.config), plan=plan))

    def followed(self, tapes: Sequence[RankTapes], ranks: Sequence[RankPlan]) -> PipelineStep:
        """The last one of steps that follow a plan from the begin, with the peaks of all of them.

        That is what an engine does. What is tried comes after a step in which all leaves, and is
        nearly the same: host memory may be laid out in another way.
        """
        self._count()
        plan = OffloadPlan("", 0, 0.0, 0.0, tuple(ranks))
        config = replace(without_plan(self.config), plan=plan)
        steps = predict_each(self.order, tapes, self.hardware, config, self.peers, NUM_FOLLOWED)
        of_ranks = zip(*[step.ranks for step in steps], strict=True)
        return PipelineStep([_with_peaks(each) for each in of_ranks])

    def with_more_on_the_host(self) -> Steps:
        """The same with as much host memory as groups take."""
        return replace(self, config=replace(self.config, host_budget_bytes=None))

    def _count(self) -> None:
        if self.progress is not None:
            self.progress(self.num)
        self.num += 1


def _with_peaks(steps: Sequence[RankStep]) -> RankStep:
    """The last one of a rank, with the highest peak of all of them."""
    return replace(steps[-1], peak_bytes=max(step.peak_bytes for step in steps))


@dataclass(frozen=True)
class Tried:
    """A choice, and what it costs."""

    kept: tuple[Stay, ...]
    """What stays, rank by rank."""

    step: PipelineStep

    is_followed: bool = False
    """Whether the step is as :meth:`Steps.followed` says it."""

    @property
    def peak_bytes(self) -> int:
        """Of the fullest rank."""
        return max(rank.peak_bytes for rank in self.step.ranks)

    def fits(self, limit_bytes: int) -> bool:
        """Whether no peak is above the limit."""
        return self.peak_bytes <= limit_bytes


def most_tries(order: PipelineOrder, tapes: Sequence[RankTapes]) -> int:
    """How many steps there is time for, for a plan."""
    of_each = [tape.num_events for one in tapes for tape in one.stages.values()]
    return min(MAX_TRIES, MAX_EVENTS // max(1, sum(of_each) * order.num_microbatches))


def best_of(tried: Sequence[Tried]) -> Tried:
    """The shortest; of those that are as short, one that sends least away, and keeps most."""
    shortest_s = min(one.step.seconds for one in tried)
    short = [one for one in tried if one.step.seconds <= shortest_s * (1 + SAME)]
    return min(short, key=lambda one: (_bytes_sent(one), -sum(map(len, one.kept))))


def _bytes_sent(tried: Tried) -> int:
    return sum(rank.bytes_offloaded for rank in tried.step.ranks)
