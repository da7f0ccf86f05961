"""What a table says below its rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pp_offload.plan import OffloadPlan, RankPlan
from pp_offload.plan.table import table


@pytest.mark.parametrize(("stalled_s", "is_said"), [(0.11, True), (0.09, False)])
def test_copies_that_have_too_much_to_do(stalled_s: float, is_said: bool) -> None:
    plan = OffloadPlan("", 2**30, 1.0, 1.0, (RankPlan((), stalled_s=stalled_s),))
    without: Any = SimpleNamespace(ranks=[SimpleNamespace(peak_bytes=0)])
    assert ("Copies have too much" in table(plan, without)) is is_said
