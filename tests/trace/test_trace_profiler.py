"""With ``torch.profiler``: names in its trace, and both in one file on the same clock."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_trace_file import check_event, raw
from torch.profiler import ProfilerActivity, profile
from toy import batches, make_model, run_step

from pp_offload import OffloadConfig, use_backend
from pp_offload.backends import CpuBackend
from pp_offload.simulate import DEVICES, VirtualBackend
from pp_offload.trace import Timeline, Trace, merge, read, write
from pp_offload.trace.chrome import OURS
from pp_offload.trace.chrome import FOREIGN_PROCESSES

CONFIG = OffloadConfig(min_offloaded_tensor_size=1)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A trace, and the profiler's of the same step."""
    folder = tmp_path_factory.mktemp("traces")
    ours, profiled = folder / "out.json.gz", folder / "profiled.json"
    with use_backend(CpuBackend(), config=CONFIG):
        model = make_model()
        run_step(model, batches(2))
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            with Trace(ours):
                run_step(model, batches(2))
        profiler.export_chrome_trace(str(profiled))
    return ours, profiled


def annotations(path: Path) -> list[dict[str, Any]]:
    events = raw(path)["traceEvents"]
    return [event for event in events if event.get("cat") == "user_annotation"]


def test_the_profiler_has_our_names(files: tuple[Path, Path]) -> None:
    """As often as we have spans."""
    ours, profiled = files
    names = Counter(event["name"] for event in annotations(profiled))
    timeline = read(ours)
    spans = Counter(span.name for span in timeline.spans if not span.name.startswith("waits"))
    expected = {name: num for name, num in spans.items() if not name.startswith("step")}
    assert expected == {name: num for name, num in names.items() if name in expected}
    assert {"mlp (forward)", "mlp (backward)", "mlp (offload)", "mlp (reload)"} <= names.keys()


def test_without_a_trace_the_profiler_has_none_of_them() -> None:
    with use_backend(CpuBackend(), config=CONFIG):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            run_step(make_model(), batches(2))
    assert not [one for one in profiler.events() if one.name.startswith(("mlp", "mix"))]


def test_one_file_on_one_clock(files: tuple[Path, Path], tmp_path: Path) -> None:
    """The n-th forward of a group is the n-th annotation of its name, and begins just after it:
    the annotation is entered before the group is marked, and left behind the mark of its end.
    """
    merge(files[0], [files[1]], tmp_path / "both.json.gz")
    both = raw(tmp_path / "both.json.gz")
    events = both["traceEvents"]
    ours = [event for event in events if event.get("cat") == OURS]
    for event in ours:
        check_event(event, 1)
    assert len(ours) == len(raw(files[0])["traceEvents"])
    assert len(events) == len(ours) + len(raw(files[1])["traceEvents"])
    for name in ("mix (forward)", "mlp (forward)"):
        spans = sorted((e for e in ours if e["name"] == name), key=lambda one: one["ts"])
        around = [e for e in events if e["name"] == name and e.get("cat") == "user_annotation"]
        around.sort(key=lambda one: one["ts"])
        assert len(spans) == len(around) == 6
        for span, annotation in zip(spans, around, strict=True):
            is_inside = annotation["ts"] - SLACK_US <= span["ts"]
            end, outer_end = (one["ts"] + one["dur"] for one in (span, annotation))
            assert is_inside and end <= outer_end + SLACK_US
            assert annotation["ts"] < end and span["ts"] < outer_end, "they run at the same time"


SLACK_US = 1000
"""By which two clocks of one machine may differ: the profiler computes the wall clock's time from
the processor's. A step takes some ten times as long; with another base it would be years."""


def test_the_times_of_both_stay_as_they_were(files: tuple[Path, Path], tmp_path: Path) -> None:
    merge(files[0], [files[1]], tmp_path / "both.json")
    both, profiled, ours = raw(tmp_path / "both.json"), raw(files[1]), raw(files[0])
    base_ns = both["baseTimeNanoseconds"]
    assert base_ns == min(profiled["baseTimeNanoseconds"], ours["baseTimeNanoseconds"])
    first = next(event for event in ours["traceEvents"] if event["ph"] == "X")
    moved = next(e for e in both["traceEvents"] if e["ph"] == "X" and e.get("cat") == OURS)
    by_us = (ours["baseTimeNanoseconds"] - base_ns) / 1e3
    assert moved["ts"] == pytest.approx(first["ts"] + by_us, abs=0.01)
    theirs = [event for event in both["traceEvents"] if event.get("cat") != OURS]
    by_us = (profiled["baseTimeNanoseconds"] - base_ns) / 1e3
    for old, new in zip(profiled["traceEvents"], theirs, strict=True):
        assert new == old | ({"ts": old["ts"] + by_us} if "ts" in old else {})
    assert both["traceName"] == profiled["traceName"], "what else it says is kept"
    merged, alone = read(tmp_path / "both.json"), read(files[0])
    assert len(merged.spans) == len(alone.spans) and merged.metadata == alone.metadata


def test_a_process_with_the_number_of_a_rank_is_another_one(tmp_path: Path) -> None:
    """As in a container, where training may be process 1."""
    ours, profiled = tmp_path / "ours.json", tmp_path / "profiled.json"
    write(Timeline(2_000_000, metadata={0: {}, 1: {}}), ours)
    event = {"ph": "X", "name": "op", "ts": 5.0, "dur": 1.0, "pid": 1, "tid": 1}
    said = {"baseTimeNanoseconds": 1_000_000, "traceEvents": [event, event | {"pid": "Spans"}]}
    profiled.write_text(json.dumps(said))
    merge(ours, [profiled, profiled], tmp_path / "both.json")
    both = raw(tmp_path / "both.json")
    found = [(e["pid"], e["ts"]) for e in both["traceEvents"] if e.get("cat") != OURS]
    assert found == [
        (FOREIGN_PROCESSES + 1, 5.0),
        ("Spans", 5.0),
        (2 * FOREIGN_PROCESSES + 1, 5.0),
        ("Spans", 5.0),
    ]
    assert both["baseTimeNanoseconds"] == 1_000_000


def test_a_profile_with_a_later_base_is_moved(tmp_path: Path) -> None:
    ours, profiled = tmp_path / "ours.json", tmp_path / "profiled.json"
    write(Timeline(1_000_000, metadata={0: {}}), ours)
    event = {"ph": "X", "name": "op", "ts": 5.0, "dur": 1.0, "pid": 7, "tid": 1}
    profiled.write_text(json.dumps({"baseTimeNanoseconds": 3_000_000, "traceEvents": [event]}))
    merge(ours, [profiled], tmp_path / "both.json")
    both = raw(tmp_path / "both.json")
    assert both["baseTimeNanoseconds"] == 1_000_000
    assert [e for e in both["traceEvents"] if e.get("cat") != OURS] == [event | {"ts": 2005.0}]


def test_what_has_no_time_in_common_is_refused(tmp_path: Path) -> None:
    virtual, other = tmp_path / "virtual.json", tmp_path / "other.json"
    write(Timeline(0, metadata={0: {}}), virtual)
    other.write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match=r"virtual\.json is of a virtual run"):
        merge(virtual, [other], tmp_path / "both.json")
    write(Timeline(7, metadata={0: {}}), virtual)
    with pytest.raises(ValueError, match=r"other\.json has no baseTimeNanoseconds"):
        merge(virtual, [other], tmp_path / "both.json")
    assert not (tmp_path / "both.json").exists()


def test_a_virtual_run_can_be_profiled_as_well(tmp_path: Path) -> None:
    with use_backend(VirtualBackend(DEVICES["H100"]), config=CONFIG):
        model = make_model(width=64, device="meta")
        trace = Trace(tmp_path / "out.json")
        with profile(activities=[ProfilerActivity.CPU]) as profiler, trace:
            run_step(model, [x.to("meta") for x in batches(2, 64)])
    assert trace.timeline is not None and trace.timeline.of(0, "d2h")
    assert "mlp (forward)" in {event.name for event in profiler.events()}
