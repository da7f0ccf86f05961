"""Plans that have layers recomputed: what the engine then does, beside every choice there is."""

from __future__ import annotations

import pytest
from helpers.plans.chosen import MOST_LONGER, check_follows, chosen, slow
from helpers.plans.every_choice import choices, each_number
from helpers.plans.small import limits, planned

from pp_offload.plan import RankTapes, record

pytestmark = pytest.mark.usefixtures("small_bounds")


@pytest.mark.parametrize("seed", [8, 35, *slow(2, 5, 12, 20, 46, 51, 78)])
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
