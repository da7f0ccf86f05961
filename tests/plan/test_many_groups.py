"""Many groups that all differ are planned with a few predicted steps, whatever the limit is."""

from __future__ import annotations

from typing import Any

import pytest
from many_groups import limit_between, many_groups
from test_choose import check_follows

from pp_offload.plan import InfeasibleError, OffloadPlan, choose, chooser

NUM = 60

FEW = 100
"""No time is looked at: how many steps are predicted is the same on any machine."""


def planned_in(part: float, *, in_order: bool = False) -> tuple[Any, OffloadPlan, int]:
    """A plan for a limit between least and most, and how many steps were predicted."""
    drawn, tapes = many_groups(NUM, in_order=in_order)
    limit = limit_between(drawn, tapes, part)
    predicted: list[int] = []
    plan = choose(drawn.order, tapes, drawn.hardware, limit, progress=predicted.append)
    return drawn, plan, len(predicted)


@pytest.mark.parametrize("part", [0.0, 0.1, 0.3, 0.5, 0.9])
def test_a_plan_takes_a_few_predictions(part: float) -> None:
    drawn, plan, num = planned_in(part)
    assert num <= FEW
    check_follows(drawn, plan)


def test_what_leaves_is_spread_over_a_forward() -> None:
    """Where the largest groups are the last, all that leaves would be saved at once before them."""
    _, plan, _ = planned_in(0.11, in_order=True)
    assert plan.seconds == pytest.approx(plan.least_seconds, rel=chooser.WORTH_IT)


def test_a_limit_that_cannot_be_met_is_refused_with_a_few_predictions() -> None:
    drawn, tapes = many_groups(NUM)
    predicted: list[int] = []
    with pytest.raises(InfeasibleError) as refused:
        choose(drawn.order, tapes, drawn.hardware, 1, progress=predicted.append)
    least = refused.value.least_bytes
    plan = choose(drawn.order, tapes, drawn.hardware, least)
    assert max(rank.peak_bytes for rank in plan.ranks) <= least
    assert len(predicted) <= FEW
