"""Plans: below their limit, what the engine then does, near the best there is, and refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from helpers.random_pipelines import (
    Drawn,
    choices,
    each_number,
    limits,
    ordered_parts,
    planned,
    with_host_memory,
)
from torch import nn
from torch.distributed.pipelining import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

from pp_offload._common.text import size_text
from pp_offload.plan import (
    Chooser,
    InfeasibleError,
    OffloadPlan,
    RankPlan,
    RankTapes,
    choose,
    front,
    predict,
    search,
)
from pp_offload.plan.pipeline import NUM_PROVEN, peak_of
from pp_offload.plan.search import Candidate, fill
from pp_offload.plan.table import table
from pp_offload.simulate import run_pipeline
from pp_offload.simulate.device import ROUNDING_BYTES


@pytest.fixture
def all_bounds() -> None:
    """The test is of other bounds, too, than those that an engine chooses by itself."""


@pytest.fixture(autouse=True)
def few_bounds(
    small_floor: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "all_bounds" not in request.fixturenames:
        monkeypatch.setattr(search, "BOUNDS", search.BOUNDS[:1])


MOST_LONGER = 1.03
"""So many times as long as by the best of all choices; see benchmarks/results/plan_search.txt."""


def slow(*values: Any) -> list[Any]:
    """Parameters of slow cases, such as seeds of pipelines with more ranks and layers."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def chosen(drawn: Drawn, tapes: list[RankTapes], limit: int) -> OffloadPlan | None:
    try:
        return chooser_of(drawn, tapes).plan(limit)
    except InfeasibleError as failure:
        assert failure.least_bytes > limit
        return None


def check_follows(drawn: Drawn, plan: OffloadPlan) -> None:
    """What the plan says is what the engine itself does. With recipes, statistics of norms are
    counted as if their groups left, and a recipe held them: a little longer than they live.
    """
    how, most = (drawn.order, drawn.work, drawn.hardware), drawn.config.host_budget_bytes
    norms = [m for s in drawn.work.stages for m in s.modules() if isinstance(m, nn.LayerNorm)]
    num = len(norms) * drawn.order.num_microbatches * (drawn.config.rematerialize == "cheap")
    options: dict[str, Any] = {"config": replace(drawn.config, plan=plan), "peers": drawn.peers}
    runs = [run_pipeline(*how, **options, num_steps=num) for num in (1, NUM_PROVEN)]
    for number, rank in enumerate(plan.ranks):
        each = [step.ranks[number] for step in runs]
        peak_bytes = max(result.peak_bytes for result in each)
        assert 0 <= rank.peak_bytes - peak_bytes <= num * ROUNDING_BYTES
        assert rank.peak_bytes <= plan.limit_bytes
        assert rank.host_peak_bytes == each[-1].host_peak_bytes
        assert most is None or rank.host_peak_bytes <= most
        assert {result.bounds for result in each} == {rank.bounds}
    assert plan.seconds == pytest.approx(runs[-1].seconds, rel=1e-9)
    assert plan.seconds >= plan.least_seconds * (1 - 1e-9)


def chooser_of(drawn: Drawn, tapes: list[RankTapes], **options: Any) -> Chooser:
    config = replace(drawn.config, **options)
    return Chooser(drawn.order, tapes, drawn.hardware, config=config, peers=drawn.peers)


def num_followed(drawn: Drawn, tapes: list[RankTapes], num: int) -> int:
    """Of so many limits, those that can be met: the engine does what the plan for each says."""
    plans = [plan for limit in limits(drawn, tapes, num) if (plan := chosen(drawn, tapes, limit))]
    for plan in plans:
        check_follows(drawn, plan)
    return len(plans)


@pytest.mark.parametrize("host_part", [2.0, 0.3])
@pytest.mark.parametrize("seed", [20, *slow(0, 7, 9, 51)])
def test_the_engine_does_what_was_planned(seed: int, host_part: float) -> None:
    """With more host memory than it needs, and with too little for all that could leave."""
    assert num_followed(*with_host_memory(*planned(seed), host_part), 3) > 0


@pytest.mark.parametrize("seed", [2, *slow(4, 8)])
@pytest.mark.parametrize("schedule", [ScheduleInterleavedZeroBubble, *slow(ScheduleZBVZeroBubble)])
def test_the_engine_does_so_with_backwards_in_two_parts(seed: int, schedule: type) -> None:
    with ordered_parts():
        assert num_followed(*planned(seed, schedules=[schedule]), 3) > 1


@pytest.mark.parametrize("seed", [22, *slow(9)])
def test_the_least_limit_in_an_error_can_be_met(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    drawn, tapes = planned(seed)
    with pytest.raises(InfeasibleError, match="limit_bytes is 1, expected at least") as refused:
        choose(drawn.order, tapes, drawn.hardware, 1, config=drawn.config, peers=drawn.peers)
    least = refused.value.least_bytes
    plan = chosen(drawn, tapes, least)
    assert plan is not None and chosen(drawn, tapes, least - 1) is None
    assert max(rank.peak_bytes for rank in plan.ranks) == least
    assert not caplog.records, "predictions follow plans of their own options"


def test_pinning_in_the_first_step_changes_no_plan() -> None:
    drawn, tapes = planned(7)
    limit = limits(drawn, tapes, 4)[2]
    ways = []
    for pin_bytes_per_s in (None, 2.0**20):
        hardware = replace(drawn.hardware, pin_bytes_per_s=pin_bytes_per_s)
        how = {"config": drawn.config, "peers": drawn.peers}
        plan = choose(drawn.order, tapes, hardware, limit, **how)
        ways.append([rank.stages for rank in plan.ranks])
    assert ways[0] == ways[1]


def test_a_limit_that_may_need_more_host_memory_says_so() -> None:
    drawn, tapes = with_host_memory(*planned(20), 0.3)
    budget_bytes = drawn.config.host_budget_bytes
    with pytest.raises(InfeasibleError, match=f"larger host_budget_bytes than {budget_bytes}"):
        chooser_of(drawn, tapes).plan(1)
    with pytest.raises(InfeasibleError) as refused:
        chooser_of(drawn, tapes, host_budget_bytes=None).plan(1)
    assert "host_budget_bytes" not in str(refused.value)


def test_each_rank_sends_no_more_than_it_needs() -> None:
    """The first rank of a pipeline has the most in flight."""
    drawn, tapes = planned(12)
    none = predict(drawn.order, tapes, drawn.hardware, peers=drawn.peers, num_steps=1)
    peaks = [rank.peak_bytes for rank in none.ranks]
    limit = (max(peaks) + sorted(peaks)[-2]) // 2  # one rank alone is above it
    plan = chosen(drawn, tapes, limit)
    assert plan is not None
    sends = [
        any(group.nbytes and not group.keeps for stage in rank.stages for group in stage)
        for rank in plan.ranks
    ]
    assert sends == [peak > limit for peak in peaks]


# Layers that are recomputed


@pytest.mark.parametrize("seed", [8, *slow(35, 2, 5, 12, 20, 46, 51, 78)])
def test_hardly_any_choice_of_layers_and_groups_is_better(seed: int) -> None:
    drawn, tapes = planned(seed, layers="*")
    every = [choice.tried for some in each_number(tapes) for choice in choices(drawn, some)]
    low, high = min(peak for peak, _ in every), limits(drawn, tapes, 2)[1]
    num_recomputed = 0
    for limit in (low, low + (high - low) // 3, low + (high - low) * 2 // 3):
        plan = chosen(drawn, tapes, limit)
        best = min(seconds for peak, seconds in every if peak <= limit)
        assert plan is not None and plan.seconds <= best * MOST_LONGER
        num_recomputed += sum(len(names) for rank in plan.ranks for names in rank.recomputed)
        check_follows(drawn, plan)
    assert num_recomputed > 0


def test_nothing_is_recomputed_where_offload_costs_nothing() -> None:
    """Nor are layers recorded anew, which takes long."""
    drawn, tapes = planned(21, layers="*", rematerialize="none")
    low, high = limits(drawn, tapes, 2)
    recomputing = RankTapes.recomputing
    with patch.object(RankTapes, "recomputing", autospec=True, side_effect=recomputing) as spy:
        plan = chosen(drawn, tapes, low + (high - low) * 6 // 10)
    assert plan is not None and plan.seconds <= plan.least_seconds * (1 + 1e-9)
    groups = [group for rank in plan.ranks for stage in rank.stages for group in stage]
    assert any(group.nbytes and not group.keeps for group in groups), "some have to leave"
    assert not any(names for rank in plan.ranks for names in rank.recomputed)
    assert spy.called and not any(num for (_, num), _ in spy.call_args_list)


def test_layers_are_spread_and_named() -> None:
    drawn, tapes = planned(3, layers="*")
    assert [tape.num_layers for tape in tapes] == [6, 4]
    assert tapes[0].recomputing(3).recomputed == (("0", "2"), ("1",))
    assert tapes[0].recomputing(0) == tapes[0] and tapes[0].recomputed == ((), ())
    assert tapes[0].recomputing(3) is tapes[0].recomputing(3), "it is recorded once"
    assert drawn.work.stages[0][0].__class__.__name__ == "Layer", "the model is as it was"


# More memory, and what a table says of it


@pytest.mark.usefixtures("all_bounds")
@pytest.mark.parametrize("layers", [None, "*"])
@pytest.mark.parametrize("seed", [2, *slow(1, 3, 4, 8)])
def test_more_memory_is_never_slower(seed: int, layers: str | None) -> None:
    every = chooser_of(*planned(seed, layers=layers))
    plans_by_limit = front(every, num=4)
    plans, none = plans_by_limit.plans, plans_by_limit.without_offload
    for less, more in zip(plans, plans[1:], strict=False):
        assert less.limit_bytes < more.limit_bytes and less.seconds >= more.seconds
    assert all(peak_of(plan) <= plan.limit_bytes for plan in plans)
    assert plans[-1].seconds == pytest.approx(none.seconds), "all may stay"
    assert plans[-1].limit_bytes == peak_of(none)
    assert (plans_by_limit.recomputed is None) is (layers is None)
    if len(plans) > 1:
        with pytest.raises(InfeasibleError, match="expected at least"):
            every.plan(plans[0].limit_bytes - 1)


@pytest.mark.usefixtures("all_bounds")
@pytest.mark.parametrize(
    ("seed", "limit"), [(2004, 711552), pytest.param(2034, 883200, marks=pytest.mark.slow)]
)
def test_of_few_groups_each_order_is_tried_within_all_bounds(seed: int, limit: int) -> None:
    """In whole steps: a search without either made plans that took 1.08 and 5.2 times as long."""
    drawn, tapes = planned(seed)
    plan = chosen(drawn, tapes, limit)
    tried = (choice.tried for choice in choices(drawn, tapes))
    best = min(seconds for peak, seconds in tried if peak <= limit)
    assert plan is not None and plan.seconds <= best * MOST_LONGER


def shown(little: Chooser, plan: OffloadPlan) -> str:
    """The table on one line."""
    roomier = little.with_more_on_the_host(plan)
    return " ".join(table(plan, little.without_offload(), roomier).split())


@pytest.mark.parametrize(
    ("seed", "part"), [(21, 0.6), pytest.param(23, 0.3, marks=pytest.mark.slow)]
)
def test_host_memory_binds(seed: int, part: float) -> None:
    """With more of it the step is as short as the table says; and then it binds no more."""
    drawn, tapes = planned(seed, rematerialize="none")
    *_, limit, _ = limits(drawn, tapes, 4)
    little = chooser_of(*with_host_memory(drawn, tapes, part))
    plan, more = little.plan(limit), chooser_of(drawn, tapes).plan(limit)
    host = max(rank.host_peak_bytes for rank in more.ranks)
    text = f"Host memory is what binds: with {size_text(host)} of it on a rank a step takes "
    assert f"{text}{more.seconds * 1e3:.1f} ms, " in shown(little, plan)
    for enough in (chooser_of(*with_host_memory(drawn, tapes, 2.0)), chooser_of(drawn, tapes)):
        assert enough.plan(limit).seconds == more.seconds < plan.seconds
        assert "Host memory" not in shown(enough, more)


def test_copies_that_have_too_much_to_do() -> None:
    def text(stalled_s: float, *recomputed: tuple[str, ...]) -> str:
        """The table of a step of a second."""
        rank = RankPlan((), stalled_s=stalled_s, recomputed=recomputed)
        without: Any = SimpleNamespace(ranks=[SimpleNamespace(peak_bytes=0)])
        return " ".join(table(OffloadPlan("", 2**30, 1.0, 1.0, (rank,)), without).split())

    assert "Copies have too much to do: `pp-offload sweep` shows what a larger" in text(0.11)
    assert "layers that may be recomputed, Modules(layers=...), leave copies more" in text(0.11)
    assert "shows what a larger limit saves." in text(0.11, ("1",))
    assert "Copies have too much" not in text(0.09)


# What stays fits, in a few tries, whichever order groups stay in


def groups(*sizes: int) -> list[Candidate]:
    return [Candidate(nbytes, 0, "mlp", position) for position, nbytes in enumerate(sizes)]


def filled(
    candidates: list[Candidate], limit: int, peak: Callable[[Sequence[Candidate]], int]
) -> tuple[list[int], int]:
    """Positions of what stays, and how many peaks were needed."""
    proposals, num = fill(candidates), 0
    stay = next(proposals)
    try:
        while True:
            num += 1
            stay = proposals.send(peak(stay) <= limit)
    except StopIteration as end:
        return [group.position for group in end.value], num


def summed(stay: Sequence[Candidate]) -> int:
    """In flight twice, beside what is there."""
    return 100 + 2 * sum(group.nbytes for group in stay)


def test_as_many_stay_as_fit() -> None:
    for limit in range(100, 261, 7):
        positions, num = filled(groups(*[10] * 8), limit, summed)
        assert positions == [*range(min(8, (limit - 100) // 20))]
        assert num <= 5


def test_a_smaller_group_takes_the_room_that_a_larger_one_leaves() -> None:
    assert filled(groups(50, 50, 8, 8, 8), 100 + 2 * 70, summed)[0] == [0, 2, 3]


def test_all_may_be_lower_than_some() -> None:
    """With nothing to come back there is no room to be left for it."""

    def peak(stay: Sequence[Candidate]) -> int:
        others = [group for group in stay if group.nbytes == 10]
        return 100 + 1000 * (len(others) < len(stay)) + 50 * (0 < len(others) < 4)

    assert filled(groups(90, 10, 10, 10, 10), 110, peak)[0] == [1, 2, 3, 4]
