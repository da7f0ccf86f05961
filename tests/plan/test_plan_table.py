"""What a table says below its rows, and a limit's refusal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.plans.chosen import chooser_of
from helpers.plans.small import limits, planned, with_host_memory

from pp_offload._common.sizes import size_text
from pp_offload.plan import Chooser, OffloadPlan, RankPlan
from pp_offload.plan.table import table

pytestmark = pytest.mark.usefixtures("small_bounds")


def shown(chooser: Chooser, plan: OffloadPlan) -> str:
    """The table on one line."""
    roomier = chooser.with_more_on_the_host(plan)
    return " ".join(table(plan, chooser.without_offload(), roomier).split())


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


@pytest.mark.parametrize(
    ("stalled_s", "recomputed", "expected"),
    [
        (0.11, (), "Copies have too much to do: `pp-offload sweep` shows what a larger"),
        (0.11, (), "layers that may be recomputed, Modules(layers=...), leave copies more"),
        (0.11, (("1",),), "shows what a larger limit saves."),
        (0.09, (), None),
    ],
)
def test_copies_that_have_too_much_to_do(
    stalled_s: float, recomputed: tuple[tuple[str, ...], ...], expected: str | None
) -> None:
    rank = RankPlan((), stalled_s=stalled_s, recomputed=recomputed)
    plan = OffloadPlan("", 2**30, 1.0, 1.0, (rank,))
    without: Any = SimpleNamespace(ranks=[SimpleNamespace(peak_bytes=0)])
    text = " ".join(table(plan, without).split())
    assert ("Copies have too much" not in text) if expected is None else expected in text
