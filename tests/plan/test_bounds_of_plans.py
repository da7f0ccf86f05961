"""The bounds of a plan: which ones are chosen, and that later steps keep to them."""

from __future__ import annotations

import pytest
from helpers.plans.chosen import MOST_LONGER, check_follows, chooser_of, chosen
from helpers.plans.every_choice import choices
from helpers.plans.small import limits, planned

from pp_offload.plan import InfeasibleError, chooser


@pytest.mark.parametrize(
    "seed", [160, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (22, 90, 1044))]
)
def test_hardly_any_choice_of_groups_and_bounds_is_better(seed: int, small_floor: None) -> None:
    drawn, tapes = planned(seed)
    every = [choice.tried for choice in choices(drawn, tapes)]
    for limit in limits(drawn, tapes, 5):
        best = min(seconds for peak, seconds in every if peak <= limit)
        plan = chosen(drawn, tapes, limit)
        assert plan is not None and plan.seconds <= best * MOST_LONGER
        check_follows(drawn, plan)


@pytest.mark.slow
def test_smaller_bounds_meet_a_lower_limit(
    small_floor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, tapes = planned(24)
    least = chooser_of(drawn, tapes).least_limit_bytes
    plan = chosen(drawn, tapes, least)
    assert plan is not None
    check_follows(drawn, plan)
    given = {"max_in_flight_bytes": 2**40, "prefetch_bytes": 2**40}
    assert chooser_of(drawn, tapes, **given).least_limit_bytes > least, "an option is not changed"
    monkeypatch.setattr(chooser, "BOUNDS", chooser.BOUNDS[:1])
    with pytest.raises(InfeasibleError):
        chooser_of(drawn, tapes).plan(least)
