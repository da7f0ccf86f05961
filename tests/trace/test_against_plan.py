"""A run beside its plan: as planned to the byte, or the one input that was wrong is named."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

from pp_offload import OffloadConfig
from pp_offload._common.offload_plan import OffloadPlan, RankPlan
from pp_offload.errors import ConfigError
from pp_offload.plan import InfeasibleError, choose, record
from pp_offload.simulate import DEVICES, Hardware, Modules, PipelineOrder, run_pipeline
from pp_offload.trace import Timeline, Trace, compare_with_plan
from pp_offload.trace.against_plan import Compared, RankCompared
from pp_offload.trace.figures import RankFigures
from pp_offload.trace.figures import WAITS, Kind
gib = str

GIB = 2**30

ORDER = PipelineOrder(Schedule1F1B, num_ranks=4, num_stages=4, num_microbatches=8)
DEVICE = replace(DEVICES["A100"], launch_s=0.0)
CONFIG = OffloadConfig(max_in_flight_bytes=2**24, prefetch_bytes=2**24)
NARROW = replace(CONFIG, max_in_flight_bytes=1, prefetch_bytes=0)


def work_of(length: int = 2048, *, num_layers: int = 4, name: str = "linear") -> Modules:
    kind: Any = {"device": "meta", "dtype": torch.bfloat16}
    stages = [
        nn.Sequential(*(nn.Linear(2048, 2048, **kind) for _ in range(num_layers))) for _ in range(4)
    ]
    return Modules(
        stages,
        example=torch.empty(length, 2048, **kind),
        loss_fn=lambda y: y.float().square().mean(),
        groups={name: "*"},
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
    plan: OffloadPlan | None,
    *,
    hardware: Hardware = DEVICE,
    length: int = 2048,
    config: OffloadConfig = CONFIG,
    order: PipelineOrder = ORDER,
    **model: Any,
) -> Timeline:
    trace = Trace(path / "out.json.gz")
    config = replace(config, plan=plan)
    run_pipeline(order, work_of(length, **model), hardware, config=config, trace=trace)
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
    assert found.table().endswith("nothing differs by more than 2%") and found.is_as_planned
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


def test_a_step_of_a_rank_is_beside_what_the_rank_was_to_take(
    plan: OffloadPlan, tmp_path: Path
) -> None:
    """Not beside the pipeline's, in the last step of a trace and in one that others follow."""
    timeline = run(tmp_path, plan)
    found = compare_with_plan(plan, timeline)
    for one, rank in zip(found.ranks, plan.ranks, strict=True):
        assert one.planned_step_s == rank.seconds
        assert one.found_step_s == pytest.approx(rank.seconds, rel=1e-9)
    assert f"step 1: {plan.seconds * 1e3:.1f} ms, planned {plan.seconds * 1e3:.1f}" in found.table()
    first = compare_with_plan(plan, timeline, step=0)
    last = max(one.found_step_s for one in first.ranks)
    assert last == pytest.approx(first.ranks[0].found.seconds), "that of the pipeline"
    assert len({round(one.found_step_s, 9) for one in first.ranks}) > 1
    assert {one.found.seconds for one in first.ranks} == {first.ranks[0].found.seconds}


def test_host_memory_counts_earlier_steps_as_the_plan_does(
    plan: OffloadPlan, tmp_path: Path
) -> None:
    for one in compare_with_plan(plan, run(tmp_path, plan)).ranks:
        assert one.found.peak_bytes["host"] == one.planned.host_peak_bytes


def test_the_first_step_is_as_planned_too(plan: OffloadPlan, tmp_path: Path) -> None:
    assert compare_with_plan(plan, run(tmp_path, plan), step=0).is_as_planned


def test_a_run_without_the_plan(plan: OffloadPlan, tmp_path: Path) -> None:
    found = compare_with_plan(plan, run(tmp_path, None), step=0)
    assert not found.is_as_planned
    first, *_, last = (one.differences[0] for one in found.ranks)
    assert "1 group of a microbatch left and should have stayed; the engine did not" in first
    assert "4 groups of a microbatch left and should have stayed; the engine did not" in last


def test_another_length(plan: OffloadPlan, tmp_path: Path) -> None:
    found = compare_with_plan(plan, run(tmp_path, plan, length=1024))
    assert not found.is_as_planned
    sending = next(one for one in found.ranks if one.found.offloaded_bytes)
    assert sending.differences[0] == (
        "the plan is of another length, size of a microbatch or min_offloaded_tensor_size: group 0 "
        "of stage 0, 'linear', moved 4.00 MiB, planned 8.00 MiB; on a CPU some operators save "
        "other bytes than on the GPU of a plan, as dropout does"
    )
    assert any("GiB left, planned" in text for text in sending.differences)


def test_another_number_of_microbatches(plan: OffloadPlan, tmp_path: Path) -> None:
    order = PipelineOrder(Schedule1F1B, num_ranks=4, num_stages=4, num_microbatches=6)
    found = compare_with_plan(plan, run(tmp_path, plan, order=order))
    assert not found.is_as_planned
    for one in found.ranks:
        assert one.differences[0] == (
            "the plan is of another number of microbatches: a step has 6, planned 8"
        )
    unknown = compare_with_plan(replace(plan, options={}), run(tmp_path, plan, order=order))
    assert not any("microbatches" in text for one in unknown.ranks for text in one.differences)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({"name": "mlp"}, "another model: group 0 of stage 0 is 'mlp', planned 'linear'"),
        ({"num_layers": 5}, "another model: stage 0 has 5 groups in a microbatch, planned 4"),
        ({"num_layers": 3}, "another model: stage 0 has 3 groups in a microbatch, planned 4"),
    ],
)
def test_another_model(plan: OffloadPlan, tmp_path: Path, others: Any, expected: str) -> None:
    found = compare_with_plan(plan, run(tmp_path, plan, **others))
    assert not found.is_as_planned
    assert all(one.differences[0] == f"the plan is of {expected}" for one in found.ranks)


def test_another_schedule(plan: OffloadPlan, tmp_path: Path) -> None:
    order = PipelineOrder(ScheduleInterleaved1F1B, num_ranks=2, num_stages=4, num_microbatches=8)
    found = compare_with_plan(plan, run(tmp_path, plan, order=order))
    for one in found.ranks:
        assert one.differences[0] == (
            "the plan is of another schedule: the rank has 2 stages, planned 1"
        )


def test_a_step_without_groups(plan: OffloadPlan, tmp_path: Path) -> None:
    with Trace(tmp_path / "out.json.gz") as trace:
        run_pipeline(ORDER, work_of(), DEVICE, trace=trace)
    found = compare_with_plan(plan, trace.timeline)
    assert found.ranks[0].differences[0] == (
        "the plan is of another model: stage 0 has 0 groups in a microbatch, planned 4"
    )


def test_slower_operators(plan: OffloadPlan, tmp_path: Path) -> None:
    slower = replace(DEVICE, matmul_fraction=DEVICE.matmul_fraction * 0.9)
    found = compare_with_plan(plan, run(tmp_path, plan, hardware=slower))
    for one in found.ranks:
        texts = [text for text in one.differences if "ms" in text]
        assert "operators take other times than planned" in texts[0]
        assert texts[1].startswith("the step takes ") and "more of compute" in texts[1]
    assert not found.is_as_planned


def test_faster_operators_are_nothing_worse(plan: OffloadPlan, tmp_path: Path) -> None:
    faster = replace(DEVICE, matmul_fraction=DEVICE.matmul_fraction * 1.05)
    found = compare_with_plan(plan, run(tmp_path, plan, hardware=faster))
    assert any("compute works for" in text for one in found.ranks for text in one.differences)
    if found.is_as_planned:
        assert "nothing is worse than planned by more than 2%" in found.table()


def test_a_slower_link(plan: OffloadPlan, tmp_path: Path) -> None:
    slower = replace(DEVICE, link_bytes_per_s=DEVICE.link_bytes_per_s * 0.9)
    found = compare_with_plan(plan, run(tmp_path, plan, hardware=slower))
    sending = [one for one in found.ranks if one.found.offloaded_bytes]
    assert sending and not found.is_as_planned
    for one in sending:
        assert any("plan again with a Hardware of other link" in text for text in one.differences)


def test_other_bounds(plan: OffloadPlan, tmp_path: Path) -> None:
    found = all_that_differs(plan, run(tmp_path, plan, config=NARROW))
    (stalled,) = [text for text in found if "for copies, planned" in text][:1]
    assert "with bytes, compute and rates as planned" in stalled
    assert "max_in_flight_bytes 16777216 and prefetch_bytes 16777216" in stalled
    assert any("tensors came only on demand, planned" in text for text in found)


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
    assert found == (
        "device memory has a peak of 9.000 GiB, planned 8.000: memory that the plan does not know; "
        "it was made without an optimizer's state, --optimizer"
    )
    at_peak = {"in flight": GIB, "reloaded": GIB // 2}
    peaks = {"device": 9 * GIB}
    (found,) = compared(peak_bytes=peaks, at_peak_bytes=at_peak).differences
    assert found.endswith("1.000 GiB were in flight then and 0.500 back ahead of their use")
    (found,) = compared(peak_bytes={"host": 5 * GIB}).differences
    assert found.startswith("host memory has a peak of 5.000 GiB, planned 4.000")


def test_more_on_its_way_than_the_bounds_of_the_plan() -> None:
    how = {"peak_bytes": {"device": 9 * GIB}, "at_peak_bytes": {"in flight": GIB, "reloaded": 0}}
    one = replace(compared(**how), options={"max_in_flight_bytes": GIB // 4})
    (found,) = one.differences
    assert "more was in flight, 1.000 GiB, than the plan's max_in_flight_bytes, 0.250" in found
    assert "does not know" not in found


BYTES = st.integers(0, 64) | st.integers(0, 2**40)
SECONDS = st.sampled_from([0.0, 1e-6, 0.01, 0.1, 1.0]) | st.floats(0, 100)


@st.composite
def any_rank(draw: st.DrawFn) -> RankCompared:
    """Any figures, of a virtual device or of a real one."""
    planned = RankPlan(
        (),
        peak_bytes=draw(BYTES),
        host_peak_bytes=draw(BYTES),
        seconds=draw(SECONDS),
        busy_s=draw(SECONDS),
        stalled_s=draw(SECONDS),
        bytes_offloaded=draw(BYTES),
        offload_s=draw(SECONDS),
        on_demand_reloads=draw(st.none() | st.integers(0, 50)),
    )
    is_virtual = draw(st.booleans())
    found = RankFigures(
        rank=0,
        seconds=draw(SECONDS),
        busy_s=draw(SECONDS) if is_virtual else None,
        worked_s=draw(SECONDS) if is_virtual else None,
        waited_s=dict.fromkeys(WAITS, 0.0) | {Kind.WAITS_FOR_RELOAD: draw(SECONDS)},
        offloaded_bytes=draw(BYTES),
        offload_s=draw(SECONDS),
        peak_bytes=draw(st.just({}) | st.fixed_dictionaries({"device": BYTES, "host": BYTES})),
        on_demand_reloads=draw(st.none() | st.integers(0, 50)),
        reloaded_bytes=0,
        reload_s=0.0,
        written_bytes=0,
        read_bytes=0,
    )
    others = draw(st.sampled_from([(), ("the plan is of another model",)]))
    return RankCompared(0, planned, draw(SECONDS), found, others)


NAMED = {
    "peak GiB": "device memory has a peak of",
    "host GiB": "host memory has a peak of",
    "step ms": "^the step takes",
    "stalled ms": "compute waits",
    "on demand": "tensors? came only on demand",
    "sent GiB": "GiB left, planned",
    "GB/s": "copies to the host run at",
}


@settings(max_examples=500, deadline=None)
@given(any_rank())
def test_what_is_printed_and_worse_is_named(one: RankCompared) -> None:
    table = Compared(1, [one]).table()
    head, _, row = table.split("\n\n")[1].splitlines()[:3]
    shown = dict(zip(NAMED, one.row(), strict=True))
    assert all(text in row and name in head for name, text in shown.items())
    differs = []
    for pair in one.pairs:
        planned, found = pair.planned, pair.found
        if planned is None or found is None or len(set(shown[pair.head].split(" / "))) == 1:
            continue
        differs.append(abs(found - planned) > 0.02 * planned)
        more = planned - found if pair.head == "GB/s" else found - planned
        if more > 0.02 * planned:
            (line,) = [text for text in one.differences if re.search(NAMED[pair.head], text)]
            for text in shown[pair.head].split(" / "):
                assert text in line
            assert f"rank 0: {line}" in table
    if "nothing differs" in table:
        assert not any(differs) and not one.differences
    assert ("nothing" in table) == Compared(1, [one]).is_as_planned


def test_where_nobody_knows_when_compute_works() -> None:
    """On real devices; then all but the waits for copies is compared, and the pipeline's step."""
    assert compared(busy_s=None).differences == []
    compute, step = compared(busy_s=None, seconds=1.2).differences
    assert "without waits for copies the step takes 1100.0 ms, planned 900.0" in compute
    assert "such as an optimizer" in compute
    assert step == (
        "the step takes 1200.0 ms, planned 1000.0: 200.0 ms more of all but waits for copies"
    )


def test_a_short_wait_is_named_and_is_nothing_worse() -> None:
    waits = dict.fromkeys(WAITS, 0.0) | {Kind.WAITS_FOR_RELOAD: 0.11}
    one = compared(waited_s=waits)
    assert one.differences == [
        "compute waits 110.0 ms for copies, planned 100.0, which is 1.0% of a step more"
    ]
    found = Compared(1, [one])
    assert found.is_as_planned
    assert found.table().endswith("nothing is worse than planned by more than 2% of a step")


def test_lower_peaks_differ_and_are_nothing_worse() -> None:
    found = Compared(1, [compared(peak_bytes={"device": 4 * GIB, "host": GIB})])
    assert found.ranks[0].differences == [] and found.is_as_planned
    assert found.table().endswith("nothing is worse than planned by more than 2%")


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


def with_adam(plan_it: bool, run_it: bool, path: Path) -> list[RankCompared]:
    """A plan for a limit that all fits below, and a run by it, with or without an optimizer."""
    works = [work_of() for _ in "ab"]
    for work, has_it in zip(works, (plan_it, run_it), strict=True):
        work.optimizer = torch.optim.AdamW if has_it else None
    planned = choose(ORDER, record(ORDER, works[0], DEVICE, CONFIG), DEVICE, 2**40, config=CONFIG)
    trace = Trace(path / "out.json.gz")
    config = replace(CONFIG, plan=planned)
    run_pipeline(ORDER, works[1], DEVICE, config=config, trace=trace)
    assert trace.timeline is not None
    return compare_with_plan(planned, trace.timeline).ranks


def test_the_state_of_an_optimizer_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    for one in with_adam(True, False, tmp_path):
        (text,) = [text for text in one.differences if "state" in text]
        state = f"of that {gib(one.planned.optimizer_bytes)} for an optimizer's state"
        assert f"{state}: this run has none, or none yet" in text
        assert "plan without --optimizer" in text


def test_the_state_of_an_optimizer_that_was_not_planned_is_told_of(tmp_path: Path) -> None:
    for one in with_adam(False, True, tmp_path):
        said = "it was made without an optimizer's state, --optimizer"
        assert any(said in text for text in one.differences)


@pytest.mark.parametrize("has_it", [False, True])
def test_of_the_state_of_an_optimizer_that_was_planned_nothing_is_said(
    has_it: bool, tmp_path: Path
) -> None:
    assert all(one.differences == [] for one in with_adam(has_it, has_it, tmp_path))
