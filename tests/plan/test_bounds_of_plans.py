"""The bounds of a plan: which ones are chosen, and that later steps keep to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from every_choice import all_choices
from small import limits, planned
from test_choose import MOST_LONGER, check_follows, chosen
from test_plan_table import chooser_of
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

from pp_offload import OffloadConfig
from pp_offload._groups import auto_bounds
from pp_offload.plan import (
    Chooser,
    InfeasibleError,
    OffloadPlan,
    RankPlan,
    RankTapes,
    chooser,
    record,
)
from pp_offload.plan.pipeline import predict_each
from pp_offload.plan.trade_off import least_limit
from pp_offload.simulate import DEVICES, Modules, PipelineOrder, run_pipeline


def wide_stages() -> tuple[PipelineOrder, Modules]:
    """Two ranks, whose groups have very different sizes, behind each other."""
    kind = {"device": "meta", "dtype": torch.bfloat16}
    stages = [
        nn.Sequential(
            *(
                nn.Sequential(
                    nn.Linear(5120, inner, **kind), nn.GELU(), nn.Linear(inner, 5120, **kind)
                )
                for inner in inners
            )
        )
        for inners in ((15360, 15360), (40960, 20480))
    ]
    work = Modules(
        stages,
        example=torch.empty(4096, 5120, **kind),
        loss_fn=lambda y: y.float().square().mean(),
        groups={"layer": "*", "act": "*.1"},
    )
    return PipelineOrder(ScheduleGPipe, num_ranks=2, num_stages=2, num_microbatches=3), work


def test_no_step_is_above_the_limit() -> None:
    """An engine that chose its bounds from each step anew took more from the third step on."""
    order, work = wide_stages()
    hardware = replace(DEVICES["H100"], link_bytes_per_s=12.5e9)
    tapes = record(order, work, hardware)
    one = Chooser(order, tapes, hardware)
    low, high = least_limit(one), max(rank.peak_bytes for rank in one.without_offload().ranks)
    anew = []
    for part in range(8):
        plan = one.plan(low + (high - low) * part // 8)
        steps = predict_each(order, tapes, hardware, OffloadConfig(plan=plan), None, 7)
        for number, rank in enumerate(plan.ranks):
            assert max(step.ranks[number].peak_bytes for step in steps) == rank.peak_bytes
            assert {step.ranks[number].bounds for step in steps} == {rank.bounds}
            assert rank.peak_bytes <= plan.limit_bytes
        # not to the last digit: places of host memory are taken in other orders
        assert steps[-1].seconds == pytest.approx(plan.seconds, rel=1e-3)
        free = replace(plan, ranks=tuple(replace(rank, prefetch_bytes=None) for rank in plan.ranks))
        steps = predict_each(order, tapes, hardware, OffloadConfig(plan=free), None, 7)
        anew.append(max(rank.peak_bytes for step in steps for rank in step.ranks))
        anew[-1] -= plan.limit_bytes
    assert max(anew) > 0, "else nothing is shown here"


def test_an_engine_keeps_the_bounds_of_its_plan() -> None:
    """Also where copies that it has timed would say others."""
    order, work = wide_stages()
    hardware = replace(DEVICES["H100"], link_bytes_per_s=12.5e9)
    ours = [(600 * 2**20, 5 * 2**20), (2**29, 2**20)]
    tapes = record(order, work, hardware)
    plan = OffloadPlan("a test", 0, 0.0, 0.0, tuple(map(leaving, tapes, ours)))
    config = OffloadConfig(plan=plan)
    for num_steps in (1, 2, 4):
        step = run_pipeline(order, work, hardware, config=config, num_steps=num_steps)
        assert [rank.bounds for rank in step.ranks] == ours
    for rank in run_pipeline(order, work, hardware, config=OffloadConfig(), num_steps=4).ranks:
        assert rank.bounds not in ours


def leaving(tapes: RankTapes, bounds: tuple[int, int]) -> RankPlan:
    """All leaves, with these bounds."""
    in_flight, ahead = bounds
    return RankPlan(tapes.planned(()), max_in_flight_bytes=in_flight, prefetch_bytes=ahead)


@pytest.fixture
def small_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models below are small."""
    monkeypatch.setattr(auto_bounds, "LEAST_IN_FLIGHT_BYTES", 1)


@pytest.mark.parametrize(
    "seed", [22, 160, *(pytest.param(one, marks=pytest.mark.slow) for one in (90, 1044))]
)
def test_hardly_any_choice_of_groups_and_bounds_is_better(seed: int, small_floor: None) -> None:
    drawn, tapes = planned(seed)
    every = list(all_choices(drawn, tapes))
    for limit in limits(drawn, tapes, 5):
        best = min(seconds for peak, seconds in every if peak <= limit)
        plan = chosen(drawn, tapes, limit)
        assert plan is not None and plan.seconds <= best * MOST_LONGER
        check_follows(drawn, plan)


def test_smaller_bounds_meet_a_lower_limit(
    small_floor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, tapes = planned(24)
    least = least_limit(chooser_of(drawn, tapes))
    plan = chosen(drawn, tapes, least)
    assert plan is not None
    check_follows(drawn, plan)
    given = {"max_in_flight_bytes": 2**40, "prefetch_bytes": 2**40}
    assert least_limit(chooser_of(drawn, tapes, **given)) > least, "an option is not changed"
    monkeypatch.setattr(chooser, "BOUNDS", chooser.BOUNDS[:1])
    with pytest.raises(InfeasibleError):
        chooser_of(drawn, tapes).plan(least)
