"""Ranks that do what they did before are not played again, and nothing tells that they were not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from small import planned, with_disk, with_host_memory

from pp_offload.config import OffloadConfig
from pp_offload.plan import OffloadPlan, RankPlan, RankTapes
from pp_offload.plan.pipeline import FirstStep
from pp_offload.plan.rank import NumberRank
from pp_offload.plan.replay import Received

RECEIVED = Received(arrives_s=2.0, ready_s=3.0)
WAITED = Received(arrives_s=4.0, ready_s=3.0)


@pytest.mark.parametrize("arrives_s", [1.0, 2.0, 2.5, 3.0])
def test_a_message_that_nobody_waits_for_may_come_at_another_time(arrives_s: float) -> None:
    assert RECEIVED.is_as(arrives_s)


@pytest.mark.parametrize(
    ("received", "arrives_s"), [(RECEIVED, 3.5), (WAITED, 3.0), (WAITED, 3.5), (WAITED, 5.0)]
)
def test_one_that_is_waited_for_comes_at_the_same_time(
    received: Received, arrives_s: float
) -> None:
    assert not received.is_as(arrives_s)
    assert received.is_as(received.arrives_s)


def some_plans(draw: Random, tapes: list[RankTapes], config: OffloadConfig) -> Iterator[Any]:
    """Plans each of which differs from the one before on a rank, or on all."""
    ranks = [RankPlan(one.planned(())) for one in tapes]
    for _ in range(8):
        places = [
            [(stage, at) for stage, tape in one.stages.items() for at in range(len(tape.groups))]
            for one in tapes
        ]
        for number in draw.choice([range(len(tapes)), [draw.randrange(len(tapes))]]):
            bounds = draw.choice([{}, {"max_in_flight_bytes": 2**14, "prefetch_bytes": 2**14}])
            stay = [place for place in places[number] if draw.random() < 0.5]
            ranks[number] = RankPlan(tapes[number].planned(stay), **bounds)
        yield replace(config, plan=OffloadPlan("", 0, 0.0, 0.0, tuple(ranks)))


def num_played(seed: int, change: Any = None) -> tuple[int, int]:
    """How many ranks were played, and how many not. Each step is as one whose ranks all were."""
    drawn, tapes = planned(seed)
    if change is not None:
        drawn, tapes = change(drawn, tapes)
    given = drawn.order, tapes, drawn.hardware, drawn.config, drawn.peers
    first, num = FirstStep(*given), 0
    following = NumberRank.following

    def counted(rank: NumberRank, config: OffloadConfig) -> NumberRank:
        nonlocal num
        num += 1
        return following(rank, config)

    num_ranks = 0
    for config in some_plans(Random(seed), tapes, drawn.config):
        with patch.object(NumberRank, "following", counted):
            step = first.second(config)
        num_ranks += len(tapes)
        assert step == FirstStep(*given).second(config)
    return num, num_ranks - num


def test_random_pipelines_cost_the_same() -> None:
    nums = [num_played(seed) for seed in range(12)]
    assert all(map(sum, zip(*nums, strict=True)))  # some were played, and some were not


@pytest.mark.slow
@pytest.mark.parametrize("change", [None, lambda *of: with_host_memory(*of, 0.5), with_disk])
def test_more_random_pipelines_cost_the_same(change: Any) -> None:
    nums = [num_played(seed, change) for seed in range(100, 160)]
    assert all(map(sum, zip(*nums, strict=True)))
