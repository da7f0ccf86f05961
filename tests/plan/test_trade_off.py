"""Plans from the least limit to the most: none slower for more memory, and the ends are right."""

from __future__ import annotations

import pytest
from helpers.plans.chosen import MOST_LONGER, chooser_of, chosen, slow
from helpers.plans.every_choice import choices
from helpers.plans.small import planned

from pp_offload.plan import InfeasibleError, front
from pp_offload.plan.chooser import peak_of

pytestmark = pytest.mark.usefixtures("small_floor")


@pytest.mark.parametrize("layers", [None, "*"])
@pytest.mark.parametrize("seed", [2, 3, *slow(1, 4, 8)])
def test_more_memory_is_never_slower(seed: int, layers: str | None) -> None:
    chooser = chooser_of(*planned(seed, layers=layers))
    plans_by_limit = front(chooser, num=4)
    plans, none = plans_by_limit.plans, plans_by_limit.without_offload
    for less, more in zip(plans, plans[1:], strict=False):
        assert less.limit_bytes < more.limit_bytes and less.seconds >= more.seconds
    assert all(peak_of(plan) <= plan.limit_bytes for plan in plans)
    assert plans[-1].seconds == pytest.approx(none.seconds), "all may stay"
    assert plans[-1].limit_bytes == peak_of(none)
    assert (plans_by_limit.recomputed is None) is (layers is None)
    if len(plans) > 1:
        with pytest.raises(InfeasibleError, match="expected at least"):
            chooser.plan(plans[0].limit_bytes - 1)


@pytest.mark.parametrize(("seed", "limit"), [(2004, 711552), (2034, 883200)])
def test_of_few_groups_each_order_is_tried_within_all_bounds(seed: int, limit: int) -> None:
    """In whole steps: a search without either made plans that took 1.08 and 5.2 times as long."""
    drawn, tapes = planned(seed)
    plan = chosen(drawn, tapes, limit)
    tried = (choice.tried for choice in choices(drawn, tapes))
    best = min(seconds for peak, seconds in tried if peak <= limit)
    assert plan is not None and plan.seconds <= best * MOST_LONGER
