"""Every choice of groups and layers of a small pipeline, whichever of them are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress, product
from typing import Any

from helpers.plans.random_pipelines import Drawn
from pp_offload.config import AUTO, OffloadConfig, without_plan
from pp_offload.plan import OffloadPlan, RankPlan, RankTapes, chooser, predict
from pp_offload.plan.fills import first_saved
from pp_offload.plan.pipeline import predict_each
from pp_offload.plan.predictor import NUM_PROVEN
from pp_offload.simulate import PipelineStep


@dataclass(frozen=True)
class Choice:
    """What stays on each rank, within which bounds."""

    step: PipelineStep
    """One, in which optimizers have a state."""

    follow: Callable[[], list[PipelineStep]]
    """Predicts what an engine does that follows it from the first step on."""

    @property
    def tried(self) -> tuple[int, float]:
        """The peak and the time of that step."""
        return _highest([self.step]), self.step.seconds

    @cached_property
    def followed(self) -> tuple[int, float]:
        """The larger ones of what is tried and of what an engine does. They differ where steps that
        follow each other do, and where host memory is laid out in another way.
        """
        steps = [self.step, *self.follow()]
        return _highest(steps), max(self.step.seconds, steps[-1].seconds)


def _highest(steps: Sequence[PipelineStep]) -> int:
    return max(rank.peak_bytes for step in steps for rank in step.ranks)


def choices(drawn: Drawn, tapes: list[RankTapes]) -> Iterator[Choice]:
    """Each of them, also with smaller bounds than an engine chooses by itself."""
    places = [(n, group.place) for n, rank in enumerate(tapes) for group in first_saved(rank)]
    plain = without_plan(drawn.config)

    def config_of(resident: set[Any], bounds: Sequence[tuple[int, int]]) -> OffloadConfig:
        ranks = []
        for number, (tape, (in_flight, ahead)) in enumerate(zip(tapes, bounds, strict=True)):
            groups = tape.planned([place for rank, place in resident if rank == number])
            limits = {"max_in_flight_bytes": in_flight, "prefetch_bytes": ahead}
            ranks.append(RankPlan(groups, **limits))
        return replace(plain, plan=OffloadPlan("", 0, 0.0, 0.0, tuple(ranks)))

    def choice_of(config: OffloadConfig) -> Choice:
        how = drawn.hardware, config, drawn.peers
        (step,) = predict_each(drawn.order, [rank.with_state() for rank in tapes], *how, 1)
        return Choice(step, lambda: predict_each(drawn.order, tapes, *how, NUM_PROVEN))

    how = drawn.order, tapes, drawn.hardware
    own = [rank.bounds for rank in predict(*how, config=plain, peers=drawn.peers).ranks]
    is_free = AUTO in (plain.max_in_flight_bytes, plain.prefetch_bytes)
    for part in chooser.BOUNDS if is_free else [1]:
        bounds = [(max(1, int(part * flying)), max(1, int(part * ahead))) for flying, ahead in own]
        for bits in product([False, True], repeat=len(places)):
            yield choice_of(config_of(set(compress(places, bits)), bounds))


def each_number(tapes: list[RankTapes]) -> Iterator[list[RankTapes]]:
    """With each number of recomputed layers."""
    for nums in product(*(range(rank.num_layers + 1) for rank in tapes)):
        yield [rank.recomputing(num) for rank, num in zip(tapes, nums, strict=True)]
