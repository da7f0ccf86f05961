"""Plans: below their limit, what the engine then does, near the best there is, and refused."""

from __future__ import annotations

import pytest
from helpers.plans.chosen import MOST_LONGER, check_follows, chooser_of, chosen, slow
from helpers.plans.every_choice import choices, each_number
from helpers.plans.ordered_parts import ordered_parts
from helpers.plans.random_pipelines import Drawn
from helpers.plans.small import limits, planned, with_host_memory
from torch.distributed.pipelining import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

from pp_offload.plan import InfeasibleError, RankTapes, choose, predict, record

pytestmark = pytest.mark.usefixtures("small_bounds")


def num_followed(drawn: Drawn, tapes: list[RankTapes], num: int) -> int:
    """Of so many limits, those that can be met: the engine does what the plan for each says."""
    plans = [plan for limit in limits(drawn, tapes, num) if (plan := chosen(drawn, tapes, limit))]
    for plan in plans:
        check_follows(drawn, plan)
    return len(plans)


@pytest.mark.parametrize("seed", [20, *slow(0, 7, 9, 11, 51)])
def test_the_engine_does_what_was_planned(seed: int) -> None:
    assert num_followed(*planned(seed), 4) > 0


@pytest.mark.parametrize("seed", [2, *slow(4, 8)])
@pytest.mark.parametrize("schedule", [ScheduleInterleavedZeroBubble, *slow(ScheduleZBVZeroBubble)])
def test_the_engine_does_so_with_backwards_in_two_parts(seed: int, schedule: type) -> None:
    with ordered_parts():
        assert num_followed(*planned(seed, schedules=[schedule]), 4) > 1


@pytest.mark.parametrize("seed", [20, *slow(0, 7, 9, 51)])
def test_the_engine_does_so_with_little_host_memory(seed: int) -> None:
    drawn, tapes = with_host_memory(*planned(seed), 0.3)
    assert num_followed(drawn, tapes, 3) > 0
    for limit in limits(drawn, tapes, 3):
        plan = chosen(drawn, tapes, limit)
        most = drawn.config.host_budget_bytes
        assert plan is None or all(rank.host_peak_bytes <= most for rank in plan.ranks)


@pytest.mark.parametrize("seed", [22, *slow(9)])
def test_the_least_limit_in_an_error_is_one(seed: int) -> None:
    drawn, tapes = planned(seed)
    with pytest.raises(InfeasibleError, match="limit_bytes is 1, expected at least") as refused:
        choose(drawn.order, tapes, drawn.hardware, 1, config=drawn.config, peers=drawn.peers)
    least = refused.value.least_bytes
    plan = chosen(drawn, tapes, least)
    assert plan is not None and chosen(drawn, tapes, least - 1) is None
    assert max(rank.peak_bytes for rank in plan.ranks) == least


def test_tapes_of_another_smallest_tensor_are_refused() -> None:
    """A run by the plan would have the option of its config, and other groups than the tapes."""
    drawn, tapes = planned(9)
    with pytest.raises(ValueError, match="and the config beside them has 1048576, expected the"):
        choose(drawn.order, tapes, drawn.hardware, 2**40)


def test_a_limit_that_may_need_more_host_memory_says_so() -> None:
    drawn, tapes = with_host_memory(*planned(9), 0.3)
    budget_bytes = drawn.config.host_budget_bytes
    with pytest.raises(InfeasibleError, match=f"larger host_budget_bytes than {budget_bytes}"):
        chooser_of(drawn, tapes).plan(1)
    with pytest.raises(InfeasibleError) as refused:
        chooser_of(drawn, tapes, host_budget_bytes=None).plan(1)
    assert "host_budget_bytes" not in str(refused.value)


def test_each_rank_sends_no_more_than_it_needs() -> None:
    """The first rank of a pipeline has the most in flight."""
    drawn, tapes = planned(9)
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


def test_nothing_is_recomputed_where_offload_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor are layers recorded anew, which takes long."""
    recorded: list[int] = []
    recomputing = RankTapes.recomputing

    def noted(self: RankTapes, num: int) -> RankTapes:
        recorded.append(num)
        return recomputing(self, num)

    monkeypatch.setattr(RankTapes, "recomputing", noted)
    drawn, tapes = planned(21, layers="*", rematerialize="none")
    low, high = limits(drawn, tapes, 2)
    plan = chosen(drawn, tapes, low + (high - low) * 6 // 10)
    assert plan is not None and plan.seconds <= plan.least_seconds * (1 + 1e-9)
    groups = [group for rank in plan.ranks for stage in rank.stages for group in stage]
    assert any(group.nbytes and not group.keeps for group in groups), "some have to leave"
    assert not any(names for rank in plan.ranks for names in rank.recomputed)
    assert recorded and not any(recorded)


def test_layers_are_spread_and_named() -> None:
    drawn, tapes = planned(3, layers="*")
    assert [tape.num_layers for tape in tapes] == [6, 4]
    assert tapes[0].recomputing(3).recomputed == (("0", "2"), ("1",))
    assert tapes[0].recomputing(0) == tapes[0] and tapes[0].recomputed == ((), ())
    assert tapes[0].recomputing(3) is tapes[0].recomputing(3), "it is recorded once"
    assert drawn.work.stages[0][0].__class__.__name__ == "Layer", "the model is as it was"
    with pytest.raises(ValueError, match="7 layers are to be recomputed, expected 0 to 6"):
        tapes[0].recomputing(7)
    plain = record(drawn.order, planned(3)[0].work, drawn.hardware)
    with pytest.raises(ValueError, match='expected 0 to 0; name them with Modules.layers="'):
        plain[0].recomputing(1)
