"""A run beside its plan: as planned to the byte, or the input that was wrong is named."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.traces import check_file
from helpers.virtual_training import KIND, chain
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

from pp_offload import OffloadConfig
from pp_offload._common.offload_plan import OffloadPlan
from pp_offload.plan import InfeasibleError, choose, record
from pp_offload.simulate import DEVICES, Hardware, Modules, PipelineOrder, run_pipeline
from pp_offload.trace import Sample, Span, Timeline, Trace, compare_with_plan
from pp_offload.trace.figures import rank_steps

GIB = 2**30
ORDER = PipelineOrder(Schedule1F1B, num_ranks=4, num_stages=4, num_microbatches=8)
DEVICE = replace(DEVICES["A100"], launch_s=0.0)
CONFIG = OffloadConfig(max_in_flight_bytes=2**24, prefetch_bytes=2**24)
NARROW = replace(CONFIG, max_in_flight_bytes=1, prefetch_bytes=0)


def work_of(length: int = 2048, num_layers: int = 4) -> Modules:
    return chain(
        4,
        lambda: [nn.Linear(2048, 2048, **KIND) for _ in range(num_layers)],
        torch.empty(length, 2048, **KIND),
        loss_fn=lambda y: y.float().square().mean(),
        groups={"linear": "*"},
    )


@cache
def planned_by(config: OffloadConfig) -> OffloadPlan:
    """For the least limit, so that something leaves."""
    tapes = record(ORDER, work_of(), DEVICE, config)
    with pytest.raises(InfeasibleError) as refused:
        choose(ORDER, tapes, DEVICE, 1, config=config)
    return choose(ORDER, tapes, DEVICE, refused.value.least_bytes, config=config, made_for="a test")


def run(
    path: Path,
    plan: OffloadPlan | None,
    *,
    hardware: Hardware = DEVICE,
    config: OffloadConfig = CONFIG,
    order: PipelineOrder = ORDER,
    **sizes: int,
) -> Timeline:
    trace = Trace(path / "out.json.gz")
    config = replace(config, plan=plan)
    run_pipeline(order, work_of(**sizes), hardware, config=config, trace=trace)
    assert trace.timeline is not None
    return trace.timeline


@pytest.mark.parametrize("config", [CONFIG, NARROW], ids=["wide", "narrow"])
def test_what_was_planned_is_what_was_done(config: OffloadConfig, tmp_path: Path) -> None:
    plan = planned_by(config)
    timeline = run(tmp_path, plan, config=config)
    assert check_file(tmp_path / "out.json.gz", 4)["X"] == len(timeline.spans)
    begins = {timeline.of(rank, "steps")[0].begin_s for rank in timeline.ranks}
    assert len(begins) == 1, "all ranks begin a step at the same time"
    compared = compare_with_plan(plan, timeline)
    assert [rank.rank for rank in compared.ranks] == [0, 1, 2, 3]
    assert any(rank.planned.bytes_offloaded for rank in compared.ranks)
    counted = {"peak_bytes", "host_peak_bytes", "bytes_offloaded", "on_demand_reloads"}
    for rank in compared.ranks:
        for pair in rank.pairs:
            is_exact = pair.name in counted or pair.planned is None
            expected = pair.planned if is_exact else pytest.approx(pair.planned, rel=1e-9)
            assert pair.traced == expected, pair.name
    assert compared.is_as_planned and compare_with_plan(plan, timeline, step=0).is_as_planned
    table = compared.table()
    step_ms = f"{plan.seconds * 1e3:.3f}"
    assert table.startswith(f"step 1: {step_ms} ms, planned {step_ms}\n\nrank  ")
    assert table.endswith("\n\nnothing is worse than planned by more than 2%")
    assert json.loads(json.dumps(compared.figures())) == compared.figures()


def test_a_step_without_groups_has_its_peak(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "out.json.gz")
    step = run_pipeline(ORDER, work_of(), DEVICE, trace=trace)
    assert trace.timeline is not None
    traced = rank_steps(trace.timeline)
    assert [each.peak_bytes["device"] for each in traced.values()] == [
        rank.peak_bytes for rank in step.ranks
    ]


SLOWER = replace(DEVICE, matmul_fraction=DEVICE.matmul_fraction * 0.9)
SLOWER_LINK = replace(DEVICE, link_bytes_per_s=DEVICE.link_bytes_per_s * 0.9)
SIX = PipelineOrder(Schedule1F1B, num_ranks=4, num_stages=4, num_microbatches=6)


@pytest.mark.parametrize(
    ("how", "heads", "words"),
    [
        ({"length": 1024}, ["sent GiB"], "give the run the length and the options of the plan"),
        ({"order": SIX}, ["the plan is of 8 microbatches"], "in a step, which has 6"),
        (
            {"num_layers": 3},
            ["the plan is of another model"],
            "group 3 of stage 0 is None, planned linear",
        ),
        ({"hardware": SLOWER}, ["busy ms"], "operators take other times"),
        ({"hardware": SLOWER_LINK}, ["GB/s"], "a Hardware of other link"),
        ({"config": NARROW}, ["stalled ms", "on demand"], "as with other bounds on what is"),
    ],
)
def test_a_run_that_differs_names_the_figure_and_the_cause(
    how: dict[str, Any], heads: list[str], words: str, tmp_path: Path
) -> None:
    plan = planned_by(CONFIG)
    compared = compare_with_plan(plan, run(tmp_path, plan, **how))
    texts = [text for rank in compared.ranks for text in rank.differences]
    assert not compared.is_as_planned
    for head in heads:
        assert any(text.startswith(head) and words in text for text in texts), texts


def real_step(**worse: float) -> Timeline:
    """A step of a real device, without groups, whose compute is not known. A copy begins behind it,
    as where backward did not need what it copies.
    """
    spans = [
        Span(0, "steps", "step 7", 1.0, 1.0 + worse.get("step_s", 1.0), {"step": 7}),
        Span(0, "compute", "waits for mlp (reload)", 1.2, 1.2 + worse.get("stalled_s", 0.1)),
        Span(0, "d2h", "mlp (offload)", 1.0, 1.6, {"bytes": 6 * GIB}),
        Span(0, "d2h", "mlp (offload)", 2.5, 2.7, {"bytes": 2 * GIB}),
    ]
    samples = [Sample(0, name, 1.1, int(worse.get(name, 8) * GIB)) for name in ("device", "host")]
    return Timeline(1, spans, samples, metadata={0: {"has_captures": True}})


@pytest.mark.parametrize(
    ("worse", "expected"),
    [
        ({}, None),
        ({"stalled_s": 0.13}, "stalled ms 130.0, planned 100.0"),
        ({"step_s": 1.2}, "step ms 1200.0, planned 1000.0: longer compute or waits"),
        ({"device": 7.0, "host": 7.0}, None),
        ({"device": 9.0}, "peak GiB 9.000, planned 8.000: memory that the plan does not know"),
    ],
)
def test_a_step_of_a_real_device(worse: dict[str, float], expected: str | None) -> None:
    """It is compared with the step of the pipeline; what is unknown is left out."""
    stages = [[{"name": "captured", "nbytes": 1, "keeps": False}]]
    rank = {"stages": stages, "recomputed": [], "seconds": 0.5, "busy_s": 0.4, "stalled_s": 0.1}
    rank |= {"peak_bytes": 8 * GIB, "host_peak_bytes": 8 * GIB, "bytes_offloaded": 8 * GIB}
    content = {"format": "pp_offload plan 1", "made_for": "", "limit_bytes": 0, "seconds": 1.0}
    content |= {"least_seconds": 1.0, "ranks": [rank | {"offload_s": 0.8}]}
    plan = OffloadPlan.from_dict(content)
    compared = compare_with_plan(plan, real_step(**worse))
    (row,) = [line for line in compared.table().splitlines() if line.startswith("0 ")]
    assert "400.0 / -" in row and "  0 / -" in row
    texts = compared.ranks[0].differences
    assert [text[: len(expected or "")] for text in texts] == ([expected] if expected else [])


def test_ranks_of_a_run_that_are_the_same_rank_of_its_plan(tmp_path: Path) -> None:
    plan = planned_by(CONFIG)
    short = replace(plan, ranks=plan.ranks[:2])
    timeline = run(tmp_path, plan)
    compared = compare_with_plan(short, timeline, pipeline_rank=lambda rank: rank // 2)
    assert [rank.planned for rank in compared.ranks] == [plan.ranks[i] for i in (0, 0, 1, 1)]
