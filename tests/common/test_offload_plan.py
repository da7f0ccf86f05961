"""Plans as files, and as an option: what is in them, what is refused, and whose bounds hold."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.sessions import session
from helpers.toy import Net, batches, inputs, make_model, run_step, train

from pp_offload import ConfigError, CpuBackend, OffloadConfig, use_backend
from pp_offload._common.offload_plan import OffloadPlan, PlannedGroup, RankPlan
from pp_offload._core.group import ChunkKey
from pp_offload._groups.plan import ChunkShape, PlanCheck, make_plan, options_of

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


# Options that a plan was made with: what is kept of them, and who is told of others

MADE_FOR = {"num_microbatches": 8, "schedule": "Schedule1F1B"}


def plan_of(*, host_peak_bytes: int = 0, **options: Any) -> OffloadPlan:
    """Made with these options."""
    made_with = options_of(OffloadConfig(**options), **MADE_FOR)
    rank = RankPlan((), host_peak_bytes=host_peak_bytes)
    return OffloadPlan("a test", 0, 0.0, 0.0, (rank,), made_with)


def lines_of(caplog: pytest.LogCaptureFixture, plan: OffloadPlan, **run: Any) -> list[str]:
    """What a run by the plan with these options logs, though it asks twice."""
    names = ("smallest_numel", "num_ranks", *MADE_FOR)
    about = {name: run.pop(name) for name in names if name in run}
    check = PlanCheck()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            check.check(OffloadConfig(plan=plan, **run), 0, **about)
    return caplog.messages


def test_each_option_that_differs_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"tiers": ("disk",), "max_in_flight_bytes": 2**20}
    plan = plan_of(min_offloaded_tensor_size=1, host_peak_bytes=2**20, **options)
    schedule = {"num_microbatches": 4, "schedule": "ScheduleGPipe"}
    (line,) = lines_of(caplog, plan, prefetch_bytes=7, host_budget_bytes=2**20 - 1, **schedule)
    assert line.startswith("pp_offload: pipeline rank 0: ")
    for part in (
        "tiers ['disk'], here ['host']",
        "max_in_flight_bytes 1048576, here 'auto'",
        "prefetch_bytes 'auto', here 7",
        "min_offloaded_tensor_size 1, here 1048576",
        "host_budget_bytes None, here 1048575",
        "num_microbatches 8, here 4",
        "schedule 'Schedule1F1B', here 'ScheduleGPipe'",
        "give this run the same, or plan again",
    ):
        assert part in line
    assert "split_backward" not in line


@pytest.mark.parametrize(
    ("planned", "run"),
    [
        ({}, {}),
        ({"tiers": ("disk",), "prefetch_bytes": 3}, {"tiers": ("disk",), "prefetch_bytes": 3}),
        ({}, {"num_ranks": 1}),
        ({}, {"num_microbatches": 8, "schedule": "Schedule1F1B", "verify": True}),
        ({"min_offloaded_tensor_size": 1}, {"smallest_numel": 1}),
        ({"host_peak_bytes": 2**20}, {"host_budget_bytes": 2**20}),
    ],
)
def test_what_does_what_was_planned_is_not_told_of(
    planned: Any, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert lines_of(caplog, plan_of(**planned), **run) == []


def test_a_run_without_a_schedule_is_compared_once_it_learns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rank = RankPlan(((PlannedGroup("mlp", 1, True),),))
    made_with = MADE_FOR | {"min_offloaded_tensor_size": 16}
    with session("cpu", plan=OffloadPlan("a test", 0, 0.0, 0.0, (rank,), made_with)) as manager:
        for _ in range(3):  # from which a manager learns
            train(Net(), inputs(2), True)
        manager.reset()
    options, groups = caplog.messages
    assert "min_offloaded_tensor_size 16, here 1" in options
    assert "groups of a microbatch differ from the plan of OffloadConfig" in groups


@pytest.mark.parametrize("num_here", [1, 2, 3])
def test_groups_that_only_the_plan_or_the_run_has_are_counted(num_here: int) -> None:
    plan = OffloadPlan("", 0, 0.0, 0.0, (RankPlan(((PlannedGroup("mlp", 8, False),) * 2,)),))
    chunk = ChunkShape(ChunkKey(0, 0), ("mlp",) * num_here, (8,) * num_here)
    assert make_plan((chunk,), OffloadConfig(plan=plan), 0).num_unplanned == abs(num_here - 2)
