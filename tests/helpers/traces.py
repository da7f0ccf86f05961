"""Traces made by hand, and checks of trace files."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

from pp_offload.trace import Sample, Span, Timeline
from pp_offload.trace.timeline import WAITS_FOR_OTHERS, WAITS_FOR_UNKNOWN

GIB = 2**30


def timeline_of(*ranks: int) -> Timeline:
    """A step of 100 ms on each rank, from 1 s on."""
    named = [
        ("compute", "mlp (forward)", 0, 20),
        ("compute", "mlp (backward)", 40, 100),
        ("compute", "waits for mlp (reload)", 50, 80),
        ("compute", WAITS_FOR_UNKNOWN, 85, 86),
        ("compute", WAITS_FOR_OTHERS, 20, 40),
        ("d2h", "mlp (offload)", 10, 60),
        ("h2d", "mlp (reload)", 60, 80),
    ]
    values = [
        ("device", -10, 4 * GIB),
        ("device", 20, 6 * GIB),
        ("host", 10, GIB),
        ("in flight", 10, GIB // 2),
        ("reloaded", 60, GIB // 4),
    ]
    timeline = Timeline(0, metadata={rank: {} for rank in ranks})
    for rank in ranks:
        timeline.spans.append(Span(rank, "steps", "step 5", 1.0, 1.1, {"step": 5}))
        for track, name, begin, end in named:
            times = 1 + begin / 1e3, 1 + end / 1e3
            timeline.spans.append(Span(rank, track, name, *times, {"bytes": GIB}))
        for counter, time, nbytes in values:
            timeline.samples.append(Sample(rank, counter, 1 + time / 1e3, nbytes))
    return timeline


def raw(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    content: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return content


def check_file(path: Path, num_ranks: int) -> Counter[str]:
    """Check each event against the format of Chrome traces; how many there are of each kind."""
    content = raw(path)
    assert content["schemaVersion"] == 1 and type(content["baseTimeNanoseconds"]) is int
    assert list(content["pp_offload"]) == [str(rank) for rank in range(num_ranks)]
    events = content["traceEvents"]
    fields = {"M": {"args"}, "X": {"dur", "args"}, "C": {"args"}}
    for event in events:
        kind, common = event["ph"], {"ph", "cat", "name", "ts", "pid", "tid"}
        assert event.keys() == common | fields[kind], event
        assert event["cat"] == "pp_offload" and event["name"] and event["ts"] >= 0
        assert 0 <= event["pid"] < num_ranks and event["tid"] >= 0
        assert event.get("dur", 0) >= 0
        assert kind != "C" or event["args"]["bytes"] >= 0
    labels = Counter((e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M")
    assert set(labels.values()) == {1}
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert {(pid, tid) for name, pid, tid in labels if name == "thread_name"} == used
    _check_nesting([event for event in events if event["ph"] == "X"])
    return Counter(event["ph"] for event in events)


def _check_nesting(spans: list[dict[str, Any]]) -> None:
    """On a thread a span is inside another or beside it, or viewers cut it."""
    ends: dict[tuple[int, int], list[float]] = {}
    slack = 1e-3  # a nanosecond, which begin and length are rounded to
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        stack = ends.setdefault((span["pid"], span["tid"]), [])
        while stack and stack[-1] <= span["ts"] + slack:
            stack.pop()
        end = span["ts"] + span["dur"]
        assert not stack or end <= stack[-1] + slack, span
        stack.append(end)
