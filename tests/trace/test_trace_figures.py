"""Figures of a trace: times by cause, rates, peaks; and those of the virtual run itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

from pp_offload import OffloadConfig
from pp_offload.simulate import DEVICES, Modules, PipelineOrder, run_pipeline
from pp_offload.trace import Sample, Span, Timeline, Trace
from pp_offload.trace.timeline import WAITS_FOR_UNKNOWN as UNKNOWN
from pp_offload.trace.figures import checked_step, figures_of, steps_of
from pp_offload.trace.figures import common, merged
from pp_offload.trace.figures import WAITS_FOR_COPIES, Kind, kind_of
from pp_offload.trace.timeline import WAITS_FOR_OTHERS as OTHER_WORK

COPY = {"bytes": 8 * 10**9, "payloads": 1}


def by_hand() -> Timeline:
    """A rank for 10 s: forward of 4, a wait of 1 inside the backward from 5 on, then idle."""
    spans = [
        Span(0, "steps", "step 3", 10.0, 20.0, {"step": 3}),
        Span(0, "compute", "mlp (forward)", 9.0, 14.0),  # a second of it before the step
        Span(0, "compute", "mlp (backward)", 15.0, 19.0),
        Span(0, "compute", "waits for mlp (reload)", 16.0, 17.0),
        Span(0, "compute 2", "waits for mlp (offload)", 13.5, 14.0),
        Span(0, "d2h", "mlp (offload)", 9.5, 10.5, COPY),  # it began before
        Span(0, "d2h", "mlp (offload)", 11.0, 13.0, COPY),
        Span(0, "h2d", "mlp (reload)", 15.0, 17.0, {"bytes": 2 * 10**9, "busy_s": 0.5}),
        Span(0, "disk", "write", 13.0, 14.0, {"bytes": 5}),
        Span(0, "disk 2", "write", 13.0, 14.0, {"bytes": 6}),
        Span(0, "disk", "read", 14.0, 15.0, {"bytes": 7}),
    ]
    samples = [Sample(0, "host", time_s, n) for time_s, n in ((8.0, 7), (9.5, 5), (12.0, 6))]
    samples.append(Sample(0, "host", 20.5, 9))
    return Timeline(0, spans, samples, metadata={0: {}})


def test_sets_of_times() -> None:
    assert merged([(4, 5), (0, 2), (1, 3), (3, 3.5)]) == [(0, 3.5), (4, 5)]
    assert merged([(0, 1), (1.5, 2), (3, 4)], gap=0.5) == [(0, 2), (3, 4)]
    assert common([(0, 3), (4, 9)], [(1, 2), (2.5, 5), (8, 10)]) == [
        (1, 2),
        (2.5, 3),
        (4, 5),
        (8, 9),
    ]
    assert without([(0, 3), (4, 9)], [(-2, -1), (1, 2), (2.5, 5), (10, 11)]) == [
        (0, 1),
        (2, 2.5),
        (5, 9),
    ]
    assert without([], [(0, 1)]) == [] and without([(0, 1)], []) == [(0, 1)]
    assert total([(0, 2), (1, 3), (5, 6)]) == 4


@pytest.mark.parametrize(
    ("track", "name", "kind"),
    [
        ("compute", "mlp (forward)", Kind.FORWARD),
        ("compute 2", "mlp (backward)", Kind.BACKWARD),
        ("compute", "waits for mlp (reload)", Kind.WAITS_FOR_RELOAD),
        ("compute", "waits for mlp (offload)", Kind.WAITS_FOR_OFFLOAD),
        ("compute", UNKNOWN, Kind.WAITS_FOR_DISK),
        ("compute", OTHER_WORK, Kind.WAITS_FOR_RANK),
        ("compute", "waits for nobody (forward)", Kind.FORWARD),
        ("operators", "operators", Kind.OPERATORS),
        ("d2h", "mlp (offload)", Kind.OFFLOAD),
        ("h2d", "mlp (reload)", Kind.RELOAD),
        ("disk", "write", Kind.WRITE),
        ("disk 2", "read", Kind.READ),
        ("disk", "what nobody knows", None),
        ("steps", "step 1", None),
        ("compute", "what nobody knows", None),
        ("computed elsewhere", "mlp (forward)", None),
    ],
)
def test_what_a_span_is(track: str, name: str, kind: Kind | None) -> None:
    assert kind_of(Span(0, track, name, 0.0, 1.0)) is kind


def test_figures_are_those_of_a_hand() -> None:
    (found,) = figures_of(by_hand(), 3)
    assert (found.rank, found.seconds, found.busy_s) == (0, 10.0, None)
    assert found.waited_s[Kind.WAITS_FOR_RELOAD] == 1.0
    assert found.waited_s[Kind.WAITS_FOR_OFFLOAD] == 0.5
    assert found.waited_s[Kind.WAITS_FOR_DISK] == found.waited_s[Kind.WAITS_FOR_RANK] == 0
    assert found.offload_bytes_per_s == 4e9, "of the copy that began in the step"
    assert found.reload_bytes_per_s == 4e9, "while it was busy"
    assert (found.written_bytes, found.read_bytes) == (11, 7)
    assert found.peak_bytes == {"host": 6}, "5 was said before, 9 after"


def test_compute_does_not_work_while_it_waits() -> None:
    times = times_of(by_hand().spans, (10.0, 20.0))
    assert times[Kind.FORWARD] == [(10.0, 13.5)]
    assert times[Kind.BACKWARD] == [(15.0, 16.0), (17.0, 19.0)]
    assert times[Kind.WAITS_FOR_RELOAD] == [(16.0, 17.0)]


def test_a_step_without_a_copy_has_no_rate() -> None:
    timeline = Timeline(0, [Span(0, "steps", "step 0", 0.0, 1.0, {"step": 0})], metadata={0: {}})
    (found,) = figures_of(timeline, 0)
    assert found.offload_bytes_per_s is None and found.reload_bytes_per_s is None
    assert found.peak_bytes == {}


def test_the_last_step_is_taken_and_others_are_asked_for() -> None:
    timeline = by_hand()
    timeline.spans.insert(0, Span(1, "steps", "step 2", 8.0, 9.0, {"step": 2}))
    assert steps_of(timeline) == {2: {1: (8.0, 9.0)}, 3: {0: (10.0, 20.0)}}
    assert checked_step(timeline, None) == 3 and checked_step(timeline, 2) == 2
    with pytest.raises(ValueError, match=r"step is 4, expected one of the trace: \[2, 3\]"):
        checked_step(timeline, 4)
    with pytest.raises(ValueError, match="the trace has no step"):
        checked_step(Timeline(0), None)


def test_figures_are_those_of_the_run(tmp_path: Path) -> None:
    """All that a virtual pipeline says of its ranks, from its trace alone."""
    kind = {"device": "meta", "dtype": torch.bfloat16}
    stages = [nn.Sequential(*(nn.Linear(2048, 2048, **kind) for _ in range(3))) for _ in range(2)]
    work = Modules(
        stages,
        example=torch.empty(2048, 2048, **kind),
        loss_fn=lambda y: y.float().square().mean(),
        groups={"linear": "*"},
    )
    order = PipelineOrder(Schedule1F1B, num_ranks=2, num_stages=2, num_microbatches=4)
    trace = Trace(tmp_path / "out.json.gz")
    config = OffloadConfig(prefetch_bytes=0)
    step = run_pipeline(order, work, DEVICES["A100"], config=config, trace=trace)
    assert trace.timeline is not None
    found = figures_of(trace.timeline, 1)
    assert [one.rank for one in found] == [0, 1]
    assert any(rank.stalled_s > 0 for rank in step.ranks)
    for one, rank in zip(found, step.ranks, strict=True):
        stalled_s = sum(one.waited_s[kind] for kind in WAITS_FOR_COPIES)
        assert one.busy_s == pytest.approx(rank.busy_s, rel=1e-9)
        assert stalled_s == pytest.approx(rank.stalled_s, rel=1e-9)
        waited_s = sum(rank.waited_s.values())
        assert one.waited_s[Kind.WAITS_FOR_RANK] == pytest.approx(waited_s, rel=1e-9)
        assert one.seconds == pytest.approx(rank.seconds, rel=1e-9)
        assert one.offloaded_bytes == rank.bytes_offloaded
        assert one.offload_s == pytest.approx(rank.offload_s, rel=1e-9)
        assert one.peak_bytes["device"] == rank.peak_bytes
        assert one.peak_bytes["host"] <= rank.host_peak_bytes
