"""A table says when it is the first step that needs the room; and so does a limit's refusal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_pipelines import Drawn
from small import limits, planned, with_host_memory
from test_choose import first_step, small_bounds

from pp_offload._common.option_sources import size_said
from pp_offload.plan import Chooser, InfeasibleError, OffloadPlan, RankTapes
from pp_offload.plan.table import table
from pp_offload.plan.trade_off import least_limit

_ = small_bounds  # a fixture, for each test here


def chooser_of(drawn: Drawn, tapes: list[RankTapes], **bounds: int) -> Chooser:
    config = replace(drawn.config, **bounds)
    return Chooser(drawn.order, tapes, drawn.hardware, config=config, peers=drawn.peers)


def shown(chooser: Chooser, plan: OffloadPlan) -> str:
    """The table on one line."""
    at_first = chooser.needed_at_first(plan.limit_bytes)
    roomier = chooser.with_more_on_the_host(plan)
    return " ".join(table(plan, chooser.without_offload(), at_first, roomier).split())


def num_recomputed(plan: OffloadPlan) -> int:
    return sum(len(names) for rank in plan.ranks for names in rank.recomputed)


@pytest.mark.parametrize("seed", [22, 49])
def test_layers_that_only_the_first_step_has_recomputed(seed: int) -> None:
    drawn, tapes = planned(seed, layers="*")
    chooser = chooser_of(drawn, tapes)
    needed = first_step(drawn, tapes)[0].peak_bytes
    assert num_recomputed(chooser.plan(needed)) == 0 and chooser.needed_at_first(needed) == {}
    plan = chooser.plan(needed - 1)
    assert num_recomputed(plan) > 0
    assert chooser.needed_at_first(needed - 1) == {0: needed}
    said = f"for the first step, which without needs {needed / 2**30:.2f} GiB on rank 0; later ones"
    assert said in shown(chooser, plan)
    smaller = chooser_of(drawn, tapes, max_in_flight_bytes=1, prefetch_bytes=1).plan(needed - 1)
    assert num_recomputed(smaller) == 0, "as the table says"


@pytest.mark.parametrize("seed", [5, 22])
def test_layers_that_later_steps_have_recomputed_too(seed: int) -> None:
    drawn, tapes = planned(seed, layers="*")
    chooser = chooser_of(drawn, tapes)
    plan = chooser.plan(least_limit(chooser))
    assert num_recomputed(plan) > 0 and first_step(drawn, tapes)[0].peak_bytes > plan.limit_bytes
    assert "for the first step" not in shown(chooser, plan)


def test_a_rank_that_recomputes_nothing_is_not_named() -> None:
    drawn, tapes = planned(22, layers="*")
    chooser = chooser_of(drawn, tapes)
    plan = chooser.plan(first_step(drawn, tapes)[0].peak_bytes - 1)
    assert not any(plan.ranks[1].recomputed)
    text = table(plan, chooser.without_offload(), {0: 3 * 2**30, 1: 2**40})
    assert "which without needs 3.00 GiB on rank 0; later" in " ".join(text.split())


@pytest.mark.parametrize("seed", [8, pytest.param(0, marks=pytest.mark.slow)])
def test_host_memory_binds(seed: int) -> None:
    """With more of it the step is as short as the table says; and then it binds no more."""
    drawn, tapes = planned(seed)
    *_, limit, _ = limits(drawn, tapes, 4)
    little = chooser_of(*with_host_memory(drawn, tapes, 0.6))
    plan, more = little.plan(limit), chooser_of(drawn, tapes).plan(limit)
    host = max(rank.host_peak_bytes for rank in more.ranks)
    said = f"Host memory is what binds: with {size_said(host)} of it on a rank a step takes "
    assert f"{said}{more.seconds * 1e3:.1f} ms, " in shown(little, plan)
    for enough in (chooser_of(*with_host_memory(drawn, tapes, 2.0)), chooser_of(drawn, tapes)):
        assert enough.plan(limit).seconds == more.seconds < plan.seconds
        assert "Host memory" not in shown(enough, more)


def test_a_limit_that_the_first_step_is_above() -> None:
    drawn, tapes = planned(22)
    with pytest.raises(InfeasibleError, match="which rank 0 needs in the first step, ") as refused:
        chooser_of(drawn, tapes).plan(1)
    bounds = {"max_in_flight_bytes": 1, "prefetch_bytes": 1}
    with pytest.raises(InfeasibleError, match="which rank 0 needs whatever leaves; have") as fewer:
        chooser_of(drawn, tapes, **bounds).plan(1)
    assert "give a smaller max_in_flight_bytes and prefetch_bytes" in str(refused.value)
    assert fewer.value.least_bytes < refused.value.least_bytes


def test_a_limit_that_is_enough_without_offload() -> None:
    """In the first step all leaves, and what is on its way takes more than what could stay."""
    drawn, tapes = planned(22)
    chooser = chooser_of(drawn, tapes, max_in_flight_bytes=2**40, prefetch_bytes=2**40)
    enough = max(rank.peak_bytes for rank in chooser.without_offload().ranks)
    for limit, is_enough in ((enough - 1, False), (enough, True)):
        with pytest.raises(InfeasibleError, match="expected at least") as refused:
            chooser.plan(limit)
        assert refused.value.least_bytes > enough
        assert ("or train without offload, for which" in str(refused.value)) is is_enough


def test_a_limit_that_no_step_is_below() -> None:
    drawn, tapes = planned(5)
    with pytest.raises(InfeasibleError, match="rank 0 needs whatever leaves; have") as failure:
        chooser_of(drawn, tapes).plan(1)
    peaks = [rank.peak_bytes for rank in first_step(drawn, tapes)]
    assert max(peaks) < failure.value.least_bytes
