"""Plans as files, and as an option: what is in them, what is refused, and whose bounds hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.toy import batches, make_model, run_step

from pp_offload import ConfigError, CpuBackend, OffloadConfig, use_backend
from pp_offload._common.offload_plan import OffloadPlan, PlannedGroup, RankPlan

GROUPS = (PlannedGroup("mlp", 64, True), PlannedGroup("attn", 32, False))
RANK = RankPlan((GROUPS,), (("layers.1", "layers.3"), ()), 9, 8, 0.5, 0.3, 0.1, 7, 0.2)
BOUNDED = replace(RANK, max_in_flight_bytes=5, prefetch_bytes=0)
OPTIONS = {"tiers": ["disk"], "num_microbatches": 8, "schedule": "Schedule1F1B"}
PLAN = OffloadPlan("a test", 10, 0.5, 0.25, (RANK, BOUNDED), OPTIONS)


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert OffloadPlan.load(tmp_path / "plan.json") == PLAN
    for given in (tmp_path / "plan.json", str(tmp_path / "plan.json"), PLAN):
        assert OffloadConfig(plan=given).offload_plan == PLAN
    config = OffloadConfig(plan=PLAN)
    assert OffloadConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert [rank.bounds for rank in PLAN.ranks] == [None, (5, 0)]


def test_a_plan_has_a_hash_for_plans_of_steps_are_cached() -> None:
    assert len({PLAN, replace(PLAN), replace(PLAN, seconds=1.0)}) == 2


def changed(**values: Any) -> dict[str, Any]:
    return PLAN.to_dict() | values


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], r"the format is the list \[\], expected 'pp_offload plan 1'"),
        (changed(format="pp_offload plan 2"), "expected 'pp_offload plan 1'"),
        ({"format": "pp_offload plan 1"}, r"the values do not fit \(KeyError: 'ranks'\)"),
        (changed(ranks="all"), "the values do not fit .TypeError: string indices must be"),
        (changed(ranks=[{}]), "KeyError: 'stages'"),
        (changed(ranks=[{"stages": [[7]]}]), "expected a plan as `pp-offload plan -o` writes it"),
        (changed(ranks=[{"stages": [[{"name": "mlp", "nbytes": 1}]]}]), "argument: 'keeps'"),
        (changed(more=1), "unexpected keyword argument 'more'"),
    ],
)
def test_what_is_no_plan_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        OffloadPlan.from_dict(content)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    with pytest.raises(
        ConfigError, match=rf"OffloadConfig is invalid: plan .*plan.json.*{message}"
    ):
        OffloadConfig(plan=path)


def test_bounds_of_a_plan_hold_where_no_option_says_otherwise() -> None:
    rank = RankPlan((), max_in_flight_bytes=5000, prefetch_bytes=300)
    config = OffloadConfig(plan=replace(PLAN, ranks=(rank,)), max_in_flight_bytes=77)
    with use_backend(CpuBackend(), config=config) as manager:
        for _ in range(3):
            run_step(make_model(), batches(1))
            assert manager.bounds.now == (77, 300)
