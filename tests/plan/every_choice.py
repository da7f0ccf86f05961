"""Every choice of groups and layers of a small pipeline, whichever of them are equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from random_pipelines import Drawn

from pp_offload.plan import OffloadPlan, RankPlan, RankTapes, predict

Place = tuple[int, int, int]
"""Rank, stage and position."""


def places_of(tapes: list[RankTapes]) -> list[Place]:
    """Groups that have something to move."""
    return [
        (rank, stage, position)
        for rank, one in enumerate(tapes)
        for stage, tape in one.stages.items()
        for position, group in enumerate(tape.groups)
        if group.payloads
    ]


def num_groups(tapes: list[RankTapes]) -> int:
    """How many those are."""
    return len(places_of(tapes))


def all_choices(drawn: Drawn, tapes: list[RankTapes]) -> Iterator[tuple[int, float]]:
    """The peak and the time of each."""
    places = places_of(tapes)
    for bits in product([False, True], repeat=len(places)):
        kept = [place for place, bit in zip(places, bits, strict=True) if bit]
        ranks = tuple(
            RankPlan(one.planned([(stage, position) for at, stage, position in kept if at == rank]))
            for rank, one in enumerate(tapes)
        )
        config = replace(drawn.config, plan=OffloadPlan("", 0, 0.0, 0.0, ranks))
        step = predict(drawn.order, tapes, drawn.hardware, config=config, peers=drawn.peers)
        yield max(rank.peak_bytes for rank in step.ranks), step.seconds


def every_number_and_choice(drawn: Drawn, tapes: list[RankTapes]) -> Iterator[tuple[int, float]]:
    """The same for each number of recomputed layers. The first step, where all leaves, counts."""
    for nums in product(*(range(one.num_layers + 1) for one in tapes)):
        some = [one.recomputing(num) for one, num in zip(tapes, nums, strict=True)]
        how = drawn.order, some, drawn.hardware
        step = predict(*how, config=drawn.config, peers=drawn.peers, num_steps=1)
        first = max(rank.peak_bytes for rank in step.ranks)
        for peak, seconds in all_choices(drawn, some):
            yield max(peak, first), seconds
