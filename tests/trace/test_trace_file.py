"""Every event of a file, field by field, as the format of Chrome's traces has it."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pp_offload.trace import Flow, Point, Sample, Span, Timeline, part_of, read, write
from pp_offload.trace.chrome import OURS
from pp_offload.trace.timeline import COUNTERS, TRACKS

FIELDS: dict[str, set[str]] = {
    "M": {"ph", "cat", "name", "ts", "pid", "tid", "args"},
    "X": {"ph", "cat", "name", "ts", "dur", "pid", "tid", "args"},
    "C": {"ph", "cat", "name", "ts", "pid", "tid", "args"},
    "s": {"ph", "cat", "name", "ts", "pid", "tid", "id"},
    "t": {"ph", "cat", "name", "ts", "pid", "tid", "id"},
    "f": {"ph", "cat", "name", "ts", "pid", "tid", "id", "bp"},
}
"""Of each kind of event: all it has."""

NAMES = {"process_name": "name", "thread_name": "name"} | {
    "process_sort_index": "sort_index",
    "thread_sort_index": "sort_index",
}

KNOWN = {
    "num_ranks": int,
    "max_events": int,
    "device": str,
    "clock": str,
    "steps": list,
    "is_truncated": bool,
    "has_captures": bool,
    "began_anew": bool,
}
"""What a file says of each rank that recorded something."""


def raw(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def check_schema(path: Path, num_ranks: int) -> Counter[str]:
    """Check a file that was just written; how many events of each kind it has."""
    found = raw(path)
    keys = {"schemaVersion", "displayTimeUnit", "baseTimeNanoseconds", OURS, "traceEvents"}
    assert found.keys() == keys
    assert found["schemaVersion"] == 1 and found["displayTimeUnit"] == "ms"
    assert type(found["baseTimeNanoseconds"]) is int
    assert list(found[OURS]) == [str(rank) for rank in range(num_ranks)]
    for known in found[OURS].values():
        assert known.keys() == KNOWN.keys()
        assert all(isinstance(known[key], kind) for key, kind in KNOWN.items())
    events = found["traceEvents"]
    for event in events:
        check_event(event, num_ranks)
    check_names(events, num_ranks)
    check_flows(events)
    check_nesting([event for event in events if event["ph"] == "X"])
    return Counter(event["ph"] for event in events)


def check_event(event: dict[str, Any], num_ranks: int) -> None:
    kind = event["ph"]
    assert event.keys() == FIELDS[kind], event
    assert event["cat"] == OURS and type(event["name"]) is str and event["name"]
    assert type(event["pid"]) is int and 0 <= event["pid"] < num_ranks
    assert type(event["tid"]) is int and event["tid"] >= 0
    assert type(event["ts"]) in (int, float) and event["ts"] >= 0
    if kind == "M":
        assert list(event["args"]) == [NAMES[event["name"]]] and event["ts"] == 0
    if kind == "X":
        assert type(event["dur"]) is float and event["dur"] > 0
        assert type(event["args"]) is dict
    if kind == "C":
        assert event["name"].removesuffix(" bytes") in COUNTERS
        assert list(event["args"]) == ["bytes"] and type(event["args"]["bytes"]) is int
        assert event["args"]["bytes"] >= 0
    if kind in "stf":
        assert type(event["id"]) is int and event["id"] < 2**53, "what JavaScript can count"
    if kind == "f":
        assert event["bp"] == "e", "it ends at the span around it, not at the next one"


def check_names(events: list[dict[str, Any]], num_ranks: int) -> None:
    """Each process and each thread that is used has one name and one place."""
    said = Counter((e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M")
    assert set(said.values()) == {1}
    for rank in range(num_ranks):
        names = [e["args"] for e in events if e["name"] == "process_name" and e["pid"] == rank]
        assert names == [{"name": f"rank {rank}"}]
    threads = {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xstf"}
    assert {(pid, tid) for name, pid, tid in said if name == "thread_name"} == threads
    assert {(pid, tid) for name, pid, tid in said if name == "thread_sort_index"} == threads


def check_flows(events: list[dict[str, Any]]) -> None:
    """Each begins once and ends once, in order, and each of its points is in a span."""
    flows: dict[int, list[dict[str, Any]]] = {}
    spans = [event for event in events if event["ph"] == "X"]
    for event in events:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(event)
            if event["ph"] != "f":
                assert any(is_around(span, event) for span in spans), event
    for points in flows.values():
        assert "".join(point["ph"] for point in points) in ("sf", "stf")
        assert len({(point["name"], point["pid"]) for point in points}) == 1
        assert sorted(points, key=lambda one: one["ts"]) == points


def is_around(span: dict[str, Any], event: dict[str, Any]) -> bool:
    is_there = (span["pid"], span["tid"]) == (event["pid"], event["tid"])
    return is_there and span["ts"] <= event["ts"] <= span["ts"] + span["dur"]


def check_nesting(spans: list[dict[str, Any]]) -> None:
    """On a thread a span is inside another one or beside it, or viewers cut it."""
    ends: dict[tuple[int, int], list[float]] = {}
    for span in sorted(spans, key=lambda one: (one["ts"], -one["dur"])):
        stack = ends.setdefault((span["pid"], span["tid"]), [])
        slack = 1e-3  # a nanosecond: what a begin and a length are rounded to
        while stack and stack[-1] <= span["ts"] + slack:
            stack.pop()
        end = span["ts"] + span["dur"]
        assert not stack or end <= stack[-1] + slack, span
        stack.append(end)


def one_of_each() -> Timeline:
    known = {"num_ranks": 1, "max_events": 9, "device": "cpu", "clock": "host"}
    known |= {"steps": [0], "is_truncated": False, "has_captures": False, "began_anew": False}
    return Timeline(
        1_700_000_000_000_000_001,
        [
            Span(0, "d2h", "mlp (offload)", 0.5, 1.25, {"bytes": 3}),
            Span(0, "compute", "mlp (forward)", 0.25, 4.0),
            Span(0, "compute 2", "mlp (forward)", 0.25, 4.0),
            Span(0, "h2d", "mlp (reload)", 2.0, 3.0),
        ],
        [Sample(0, "host", 0.5, 0), Sample(0, "host", 1.0, 7)],
        [
            Flow(0, "mlp", (Point("d2h", 0.5), Point("h2d", 2.0), Point("compute", 3.5))),
            Flow(0, "mlp", (Point("d2h", 0.5), Point("h2d", 2.0))),
        ],
        {0: known},
    )


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write(one_of_each(), path)
    assert read(path) == one_of_each()
    kinds = check_schema(path, 1)
    assert kinds == {"M": 2 + 2 * 4, "X": 4, "C": 2, "s": 2, "t": 1, "f": 2}
    assert [one.name for one in tmp_path.iterdir()] == [name], "nothing half is left"


def test_an_event_in_full(tmp_path: Path) -> None:
    write(one_of_each(), tmp_path / "out.json")
    events = raw(tmp_path / "out.json")["traceEvents"]
    at = {"cat": "pp_offload", "pid": 0, "tid": TRACKS.index("d2h")}
    said = {"ph": "X", "name": "mlp (offload)", "ts": 5e5, "dur": 7.5e5, "args": {"bytes": 3}}
    assert at | said in events
    assert at | {"ph": "s", "name": "mlp", "id": 0, "ts": 5e5} in events
    counter = {"ph": "C", "name": "host bytes", "ts": 1e6, "args": {"bytes": 7}}
    assert at | {"tid": 0} | counter in events


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write(one_of_each(), path)
    broken = one_of_each()
    broken.metadata[0]["device"] = object()
    with pytest.raises(TypeError):
        write(broken, path)
    assert read(path) == one_of_each()
    assert [one.name for one in tmp_path.iterdir()] == ["out.json"]


def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match=r"out\.json says nothing of pp_offload"):
        read(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="has no traceEvents"):
        read(path)


def test_another_base_is_the_same_time() -> None:
    moved = one_of_each().based_on(1_700_000_000_000_000_001 - 2 * 10**9)
    assert [one.begin_s for one in moved.spans] == [2.5, 2.25, 2.25, 4.0]
    assert moved.samples[1].time_s == 3.0 and moved.flows[1].points[1].time_s == 4.0
    assert moved.based_on(one_of_each().base_ns) == one_of_each()


@pytest.mark.parametrize(
    ("whole", "part"),
    [
        ("out.json.gz", "out.rank3.json.gz"),
        ("a/out.json", "a/out.rank3.json"),
        ("out", "out.rank3"),
        (".out", ".out.rank3"),
    ],
)
def test_each_rank_has_its_file(whole: str, part: str) -> None:
    assert part_of(whole, 3) == Path(part)


def test_a_file_that_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file .*out\.json\.gz, expected one that"):
        read(tmp_path / "out.json.gz")
    with pytest.raises(FileNotFoundError, match="found no file"):
        read(tmp_path / "nowhere" / "out.json.gz")


@pytest.mark.parametrize("name", ["out.json.gz", "a[1].b.json", ".hidden"])
def test_parts_of_ranks_that_were_not_merged_are_named(name: str, tmp_path: Path) -> None:
    """Each rank of torch.distributed writes one of its own."""
    whole = tmp_path / name
    for rank in (10, 2, 1):
        write(Timeline(0), part_of(whole, rank))
    write(Timeline(0), tmp_path / "another.rank0.json.gz")
    with pytest.raises(FileNotFoundError) as refused:
        read(whole)
    first = part_of(whole, 1).name
    said = f"found no file {whole}, but {first} and those of 2 other ranks, expected one of all ran"
    assert str(refused.value).startswith(said)
    merged = f'merge_ranks([part_of("{whole}", rank) for rank in range(num_ranks)], "{whole}")'
    assert merged in str(refused.value)
    part_of(whole, 10).unlink()
    part_of(whole, 2).unlink()
    with pytest.raises(FileNotFoundError, match="but .*rank1.* of one rank, expected one of all"):
        read(whole)
