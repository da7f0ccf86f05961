"""Predicted steps of the choices of a pipeline; each choice is predicted once.

    predictor = Predictor(order, tapes, DEVICES["H100"], OffloadConfig(), None)
    leaving = tuple(RankChoice(0, None, ()) for _ in tapes)
    predictor.short(leaving).peak_bytes

NOTE [ Short steps ]
    A schedule of many microbatches has as many in flight as one with twice as many microbatches as
    ranks, so the peaks are equal. Ways are tried on such a short step. The ways with nearly the
    shortest step are then tried with all microbatches. But a peak may still differ by a few bytes,
    and a way that does not fit then loses a group. One of few groups makes a large difference, so
    with few groups no step is shortened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from typing import Any, NamedTuple

from pp_offload._common.offload_plan import OffloadPlan, RankPlan
from pp_offload._core.group import Place
from pp_offload._groups.plan import options_of
from pp_offload.config import OffloadConfig, without_plan
from pp_offload.plan.fills import first_saved
from pp_offload.plan.pipeline import check_smallest, predict_each
from pp_offload.plan.tape import RankTapes
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.pipeline import PeerLink, PipelineStep
from pp_offload.simulate.schedules import PipelineOrder

NUM_PROVEN = 4
"""Number of steps that are predicted before a plan is returned: the first step, in which an
optimizer has no state yet, and later ones, which earlier steps could influence.
"""

FEW = 12
"""Most groups of all ranks for which all microbatches are always predicted, each order is tried
within all bounds, and single groups are exchanged.
"""

Bounds = tuple[int, int]
"""Bounds on bytes in flight, and on bytes ahead."""

Nums = tuple[int, ...]
"""Number of layers that each rank recomputes."""


class RankChoice(NamedTuple):
    """Choice of a rank: layers recomputed, bounds, and groups that stay."""

    num_recomputed: int
    bounds: Bounds | None
    """Bounds of the rank; None if the engine is to choose them."""

    stay: tuple[Place, ...]
    """Places of the groups that stay, in the order in which they were chosen."""


Choice = tuple[RankChoice, ...]
"""Choices of all ranks."""


def choice_of(
    nums: Nums,
    bounds: Iterable[Bounds | None] = repeat(None),
    stays: Iterable[tuple[Place, ...]] = repeat(()),
) -> Choice:
    """Combine the choices of all ranks; by default all groups leave, within an engine's bounds."""
    return tuple(map(RankChoice, nums, bounds, stays))


def nums_of(choice: Choice) -> Nums:
    """Number of layers that each rank recomputes."""
    return tuple(rank.num_recomputed for rank in choice)


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


@dataclass
class Predictor:
    """Predictor of one pipeline; for its fields see :class:`Chooser`."""

    order: PipelineOrder
    tapes: Sequence[RankTapes]
    hardware: Hardware
    config: OffloadConfig
    peers: PeerLink | None

    def __post_init__(self) -> None:
        check_smallest(self.tapes, self.config)
        self.no_layers: Nums = (0,) * len(self.tapes)
        self.all_layers: Nums = tuple(rank.num_layers for rank in self.tapes)
        self.has_few = sum(len(first_saved(rank)) for rank in self.tapes) <= FEW
        self._short = self.order if self.has_few else self.order.shortened()
        self._played: dict[Any, list[PipelineStep]] = {}

    def short(self, choice: Choice) -> Tried:
        """Predict a short step by a choice; see NOTE [ Short steps ]."""
        return Tried(choice, *self._steps(self._short, choice, 1))

    def whole(self, choice: Choice) -> Tried:
        """Predict a step with all microbatches."""
        return Tried(choice, *self._steps(self.order, choice, 1))

    def proven(self, choice: Choice) -> Tried:
        """Predict steps by a choice from the first on; return the last with the highest peaks."""
        steps = self._steps(self.order, choice, NUM_PROVEN)
        peaks = zip(*([rank.peak_bytes for rank in step.ranks] for step in steps), strict=True)
        last = zip(steps[-1].ranks, map(max, peaks), strict=True)
        return Tried(choice, PipelineStep([replace(rank, peak_bytes=peak) for rank, peak in last]))

    def without_offload(self, nums: Nums, *, is_short: bool = False) -> PipelineStep:
        """Predict the step in which all groups stay; the second if an optimizer has a state."""
        order = self._short if is_short else self.order
        num = 1 + any(rank.state_bytes for rank in self.tapes)
        return self._steps(order, choice_of(nums), num, is_offloading=False)[-1]

    def own_bounds(self, choice: Choice) -> list[Bounds]:
        """Return the bounds that an engine would choose for the groups that leave."""
        free = tuple(rank._replace(bounds=None) for rank in choice)
        return [rank.bounds for rank in self._steps(self._short, free, 2)[-1].ranks]

    @cached_property
    def first_bounds(self) -> list[Bounds]:
        """Bounds that an engine chooses if all groups leave."""
        return self.own_bounds(choice_of(self.no_layers))

    def tapes_of(self, nums: Nums) -> list[RankTapes]:
        """Return the tapes with these numbers of layers recomputed."""
        return [tapes.recomputing(num) for tapes, num in zip(self.tapes, nums, strict=True)]

    def plans_of(self, choice: Choice) -> Iterator[RankPlan]:
        """Make the plans of the ranks, without figures."""
        for rank, tapes in zip(choice, self.tapes_of(nums_of(choice)), strict=True):
            in_flight, ahead = rank.bounds or (None, None)
            groups = tapes.planned(frozenset(rank.stay))
            yield RankPlan(groups, max_in_flight_bytes=in_flight, prefetch_bytes=ahead)

    def _steps(
        self, order: PipelineOrder, choice: Choice, num: int, *, is_offloading: bool = True
    ) -> list[PipelineStep]:
        """Predict steps by a choice from the first one on; a single one with optimizers' state."""
        ranks = tuple((rank.num_recomputed, rank.bounds, frozenset(rank.stay)) for rank in choice)
        key = order.num_microbatches, ranks, num, is_offloading
        if key not in self._played:
            num_microbatches, plans = order.num_microbatches, tuple(self.plans_of(choice))
            options = options_of(self.config, num_microbatches=num_microbatches, schedule="")
            plan = OffloadPlan("", 0, 0.0, 0.0, plans, options=options)
            config = replace(without_plan(self.config), plan=plan) if is_offloading else None
            tapes = self.tapes_of(nums_of(choice))
            hardware = self.hardware
            if num == 1:  # stands for later steps, whose host memory is pinned already
                tapes = [rank.with_state() for rank in tapes]
                hardware = replace(hardware, pin_bytes_per_s=None)
            self._played[key] = predict_each(order, tapes, hardware, config, self.peers, num)
        return self._played[key]
