"""Plans chosen for a limit, and whether the engine then does what they say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from helpers.plans.random_pipelines import Drawn
from pp_offload.plan import Chooser, InfeasibleError, OffloadPlan, RankTapes, choose
from pp_offload.plan.predictor import NUM_PROVEN
from pp_offload.simulate import run_pipeline
from pp_offload.simulate.memory import ROUNDING_BYTES

MOST_LONGER = 1.03
"""So many times as long as by the best of all choices; see benchmarks/results/plan_search.txt."""


def slow(*values: Any) -> list[Any]:
    """Parameters of slow cases, such as seeds of pipelines with more ranks and layers."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def chosen(drawn: Drawn, tapes: list[RankTapes], limit: int) -> OffloadPlan | None:
    how = {"config": drawn.config, "peers": drawn.peers}
    try:
        return choose(drawn.order, tapes, drawn.hardware, limit, **how)
    except InfeasibleError as failure:
        assert failure.least_bytes > limit
        return None


def check_follows(drawn: Drawn, plan: OffloadPlan) -> None:
    """What the plan says is what the engine itself does. With recipes, statistics of norms are
    counted as if their groups left, and a recipe held them: a little longer than they live.
    """
    how = drawn.order, drawn.work, drawn.hardware
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
        assert {result.bounds for result in each} == {rank.bounds}
    assert plan.seconds == pytest.approx(runs[-1].seconds, rel=1e-9)
    assert plan.seconds >= plan.least_seconds * (1 - 1e-9)


def chooser_of(drawn: Drawn, tapes: list[RankTapes], **options: Any) -> Chooser:
    config = replace(drawn.config, **options)
    return Chooser(drawn.order, tapes, drawn.hardware, config=config, peers=drawn.peers)
