"""A run beside its plan: as planned to the byte, or the one input that was wrong is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

from pp_offload import OffloadConfig
from pp_offload._common.offload_plan import OffloadPlan, RankPlan
from pp_offload.errors import ConfigError
from pp_offload.plan import InfeasibleError, choose, record
from pp_offload.simulate import DEVICES, Hardware, Modules, PipelineOrder, run_pipeline
from pp_offload.trace import Timeline, Trace, compare_with_plan
from pp_offload.trace.against_plan import RankCompared
from pp_offload.trace.figures import RankFigures
from pp_offload.trace.kinds import WAITS, Kind

GIB = 2**30

ORDER = PipelineOrder(Schedule1F1B, num_ranks=4, num_stages=4, num_microbatches=8)
DEVICE = replace(DEVICES["A100"], launch_s=0.0)
CONFIG = OffloadConfig(max_in_flight_bytes=2**24, prefetch_bytes=2**24)
NARROW = replace(CONFIG, max_in_flight_bytes=1, prefetch_bytes=0)


def work_of(length: int = 2048) -> Modules:
    kind = {"device": "meta", "dtype": torch.bfloat16}
    stages = [nn.Sequential(*(nn.Linear(2048, 2048, **kind) for _ in range(4))) for _ in range(4)]
    return Modules(
        stages,
        example=torch.empty(length, 2048, **kind),
        loss_fn=lambda y: y.float().square().mean(),
        groups={"linear": "*"},
    )


@pytest.fixture(scope="module")
def plan() -> OffloadPlan:
    """For the least limit, so that something leaves."""
    tapes = record(ORDER, work_of(), DEVICE, CONFIG)
    with pytest.raises(InfeasibleError) as refused:
        choose(ORDER, tapes, DEVICE, 1, config=CONFIG)
    limit_bytes = refused.value.least_bytes
    return choose(ORDER, tapes, DEVICE, limit_bytes, config=CONFIG, made_for="a test")


def run(
    path: Path,
    plan: OffloadPlan,
    *,
    hardware: Hardware = DEVICE,
    length: int = 2048,
    config: OffloadConfig = CONFIG,
) -> Timeline:
    trace = Trace(path / "out.json.gz")
    config = replace(config, plan=plan)
    run_pipeline(ORDER, work_of(length), hardware, config=config, trace=trace)
    assert trace.timeline is not None
    return trace.timeline


def test_what_was_planned_is_what_was_done(plan: OffloadPlan, tmp_path: Path) -> None:
    found = compare_with_plan(plan, run(tmp_path, plan))
    assert [one.rank for one in found.ranks] == [0, 1, 2, 3]
    assert any(one.planned.bytes_offloaded for one in found.ranks)
    for one in found.ranks:
        assert one.differences == []
        assert one.found.offloaded_bytes == one.planned.bytes_offloaded
        assert one.found.on_demand_reloads == one.planned.on_demand_reloads
        assert one.found.peak_bytes["device"] == one.planned.peak_bytes
        assert one.found.busy_s == pytest.approx(one.planned.busy_s, rel=1e-9)
        assert one.found.offload_s == pytest.approx(one.planned.offload_s, rel=1e-9)
        assert one.found_stalled_s == pytest.approx(one.planned.stalled_s, rel=1e-9)
    assert found.table().endswith("nothing differs by more than 2%")
    assert json.loads(json.dumps(found.figures())) == found.figures()


def test_what_comes_on_demand_is_planned(plan: OffloadPlan, tmp_path: Path) -> None:
    tapes = record(ORDER, work_of(), DEVICE, NARROW)
    how = {"config": NARROW, "made_for": "a test"}
    narrow = choose(ORDER, tapes, DEVICE, plan.limit_bytes, **how)
    found = compare_with_plan(narrow, run(tmp_path, narrow, config=NARROW))
    numbers = [(one.planned.on_demand_reloads, one.found.on_demand_reloads) for one in found.ranks]
    assert all(planned == done for planned, done in numbers) and any(map(sum, numbers))
    assert all(one.differences == [] for one in found.ranks)
    file = tmp_path / "plan.json"
    narrow.save(file)
    assert OffloadPlan.load(file) == narrow


def test_a_plan_of_before_does_not_say_what_comes_on_demand(plan: OffloadPlan) -> None:
    found = plan.to_dict()
    found["ranks"] = [
        {name: value for name, value in rank.items() if name != "on_demand_reloads"}
        for rank in found["ranks"]
    ]
    older = OffloadPlan.from_dict(found)
    assert [rank.on_demand_reloads for rank in older.ranks] == [None] * 4
    assert replace(older, ranks=plan.ranks) == plan


def all_that_differs(plan: OffloadPlan, timeline: Timeline) -> list[str]:
    return [text for one in compare_with_plan(plan, timeline).ranks for text in one.differences]


def test_the_first_step_follows_no_plan(plan: OffloadPlan, tmp_path: Path) -> None:
    found = compare_with_plan(plan, run(tmp_path, plan), step=0)
    assert "the step is the first one" in found.ranks[0].differences[0]


def test_another_length(plan: OffloadPlan, tmp_path: Path) -> None:
    found = all_that_differs(plan, run(tmp_path, plan, length=1024))
    assert found[0].startswith("0.") and "or the plan is for another model" in found[0]
    assert "compute works for" in found[1]


def test_slower_operators(plan: OffloadPlan, tmp_path: Path) -> None:
    slower = replace(DEVICE, matmul_fraction=DEVICE.matmul_fraction * 0.9)
    found = all_that_differs(plan, run(tmp_path, plan, hardware=slower))
    assert found and all("operators take other times than planned" in text for text in found)


def test_a_slower_link(plan: OffloadPlan, tmp_path: Path) -> None:
    slower = replace(DEVICE, link_bytes_per_s=DEVICE.link_bytes_per_s * 0.9)
    found = all_that_differs(plan, run(tmp_path, plan, hardware=slower))
    assert found and all("plan again with a Hardware of other link" in text for text in found)


def test_other_bounds(plan: OffloadPlan, tmp_path: Path) -> None:
    found = all_that_differs(plan, run(tmp_path, plan, config=NARROW))
    assert found and all("the bounds are others" in text for text in found)
    assert any("tensors on demand, planned" in text for text in found)


def compared(**found: object) -> RankCompared:
    """A rank of which all is as planned but for what is given."""
    planned = RankPlan(
        (), peak_bytes=8 * GIB, host_peak_bytes=4 * GIB, seconds=1.0, busy_s=0.8, stalled_s=0.1
    )
    figures = {
        "rank": 0,
        "seconds": 1.0,
        "busy_s": 0.8,
        "waited_s": dict.fromkeys(WAITS, 0.0) | {Kind.WAITS_FOR_RELOAD: 0.1},
        "peak_bytes": {"device": 8 * GIB, "host": 4 * GIB},
        "on_demand_reloads": None,
    }
    none = dict.fromkeys(
        "offloaded_bytes reloaded_bytes offload_s reload_s written_bytes read_bytes".split(), 0
    )
    return RankCompared(0, planned, 1.0, RankFigures(**(none | figures | found)))  # type: ignore[arg-type]


def test_memory_that_a_plan_does_not_know() -> None:
    assert compared().differences == []
    (found,) = compared(peak_bytes={"device": 9 * GIB, "host": GIB}).differences
    assert found.startswith("device memory has a peak of 9.000 GiB, planned 8.000: the optimizer's")
    (found,) = compared(peak_bytes={"host": 5 * GIB}).differences
    assert found.startswith("host memory has a peak of 5.000 GiB, planned 4.000")


def test_where_nobody_knows_when_compute_works() -> None:
    """On real devices; then all but the waits for copies is compared."""
    assert compared(busy_s=None).differences == []
    (found,) = compared(busy_s=None, seconds=1.2).differences
    assert "without waits for copies the step takes 1100.0 ms, planned 900.0" in found
    assert "such as an optimizer" in found


def test_what_a_trace_does_not_say_is_left_out() -> None:
    (row,) = [compared(busy_s=None, peak_bytes={}).row()]
    assert row[0] == "8.000 / -" and row[-1] == "- / -" and row[4] == "- / -"


def test_another_number_of_ranks(plan: OffloadPlan, tmp_path: Path) -> None:
    short = replace(plan, ranks=plan.ranks[:2])
    timeline = run(tmp_path, plan)
    with pytest.raises(ConfigError, match="the plan is for 2 pipeline ranks, and this is rank 2"):
        compare_with_plan(short, timeline)
    found = compare_with_plan(short, timeline, pipeline_rank=lambda rank: rank // 2)
    assert [one.planned for one in found.ranks] == [plan.ranks[i] for i in (0, 0, 1, 1)]
    with pytest.raises(ValueError, match="step is 7, expected one of the trace"):
        compare_with_plan(plan, timeline, step=7)
