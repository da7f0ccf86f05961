"""Timelines as Chrome's JSON, which Perfetto opens, and back.

    write(timeline, "out.json.gz")   # gzipped, for the name says so
    timeline = read("out.json.gz")

A rank is a process, a track a thread of it. Times are microseconds since ``baseTimeNanoseconds``,
as in the files of ``torch.profiler``. A file appears under its name when all of it is written.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pp_offload.trace.events import TRACKS, Flow, Point, Sample, Span, Timeline
from pp_offload.trace.parts import absence_said

OURS = "pp_offload"
"""The category of our spans and flows, and the key of what is known of each rank."""

FLOWS_OF_A_RANK = 2**32
"""Numbers of flows are kept apart by rank: those of two files never meet."""

Event = dict[str, Any]


def write(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a file; gzipped if its name ends in ``.gz``."""
    write_json(to_json(timeline), path)


def read(path: str | os.PathLike[str]) -> Timeline:
    """The timeline of a file that :func:`write`, or a merge, has written.

    Raises:
        FileNotFoundError: There is none; files of its ranks may be there, which are to be merged.
        ValueError: It is none of ours.
    """
    try:
        found = read_json(path)
    except FileNotFoundError as failure:
        raise FileNotFoundError(absence_said(path)) from failure
    if OURS not in found:
        raise ValueError(f"{path} says nothing of {OURS}, expected a file that a Trace has written")
    return from_json(found)


def to_json(timeline: Timeline) -> dict[str, Any]:
    """What stands in the file."""
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": timeline.base_ns,
        OURS: {str(rank): known for rank, known in sorted(timeline.metadata.items())},
        "traceEvents": [*_names(timeline), *_spans(timeline), *_samples(timeline)]
        + [*_flows(timeline)],
    }


def from_json(found: dict[str, Any]) -> Timeline:
    """The timeline that stands in a file; what others wrote there is left out."""
    timeline = Timeline(int(found["baseTimeNanoseconds"]))
    timeline.metadata = {int(rank): known for rank, known in found[OURS].items()}
    tracks: dict[tuple[int, int], str] = {}
    flows: dict[tuple[int, int], list[Event]] = {}
    for event in found["traceEvents"]:
        kind = event["ph"]
        if event.get("cat") != OURS:
            continue
        rank, tid = event["pid"], event["tid"]
        if kind == "M" and event["name"] == "thread_name":
            tracks[rank, tid] = event["args"]["name"]
        elif kind == "X":
            begin_s, seconds = event["ts"] / 1e6, event["dur"] / 1e6
            where = rank, tracks[rank, tid], event["name"]
            timeline.spans.append(Span(*where, begin_s, begin_s + seconds, event["args"]))
        elif kind == "C":
            nbytes = event["args"]["bytes"]
            timeline.samples.append(Sample(rank, _counter(event), event["ts"] / 1e6, nbytes))
        elif kind in "stf":
            flows.setdefault((rank, event["id"]), []).append(event)
    for (rank, _), events in flows.items():
        points = [Point(tracks[rank, one["tid"]], one["ts"] / 1e6) for one in events]
        timeline.flows.append(Flow(rank, events[0]["name"], tuple(points)))
    return timeline


def write_json(content: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write JSON; gzipped if the name ends in ``.gz``. A file that was there is replaced at once.

    Raises:
        OSError: It cannot be written; what was there is there.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    data = json.dumps(content, separators=(",", ":")).encode()
    try:
        partial.write_bytes(gzip.compress(data, 6) if target.suffix == ".gz" else data)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What stands in a file, gzipped or not, whatever its name.

    Raises:
        ValueError: It is no trace in JSON.
    """
    data = Path(path).read_bytes()
    found = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    if not isinstance(found, dict) or "traceEvents" not in found:
        raise ValueError(f"{path} has no traceEvents, expected a trace in Chrome's JSON")
    return found


def _tids(timeline: Timeline) -> dict[tuple[int, str], int]:
    """The number of each track that is used: a known one has the same number in every rank."""
    used = {(one.rank, one.track) for one in timeline.spans}
    used |= {(flow.rank, point.track) for flow in timeline.flows for point in flow.points}
    tids: dict[tuple[int, str], int] = {}
    for rank in sorted({rank for rank, _ in used}):
        more = sorted(track for one, track in used if one == rank and track not in TRACKS)
        for tid, track in enumerate([*TRACKS, *more]):
            if (rank, track) in used:
                tids[rank, track] = tid
    return tids


def _names(timeline: Timeline) -> Iterator[Event]:
    for rank in timeline.ranks:
        yield _named(rank, 0, "process_name", {"name": f"rank {rank}"})
        yield _named(rank, 0, "process_sort_index", {"sort_index": rank})
    for (rank, track), tid in _tids(timeline).items():
        yield _named(rank, tid, "thread_name", {"name": track})
        yield _named(rank, tid, "thread_sort_index", {"sort_index": tid})


def _named(rank: int, tid: int, what: str, args: Event) -> Event:
    return {"ph": "M", "cat": OURS, "name": what, "ts": 0, "pid": rank, "tid": tid, "args": args}


def _spans(timeline: Timeline) -> Iterator[Event]:
    tids = _tids(timeline)
    for span in timeline.spans:
        yield {
            "ph": "X",
            "cat": OURS,
            "name": span.name,
            "pid": span.rank,
            "tid": tids[span.rank, span.track],
            "ts": span.begin_s * 1e6,
            "dur": (span.end_s - span.begin_s) * 1e6,
            "args": dict(span.args),
        }


def _samples(timeline: Timeline) -> Iterator[Event]:
    for one in timeline.samples:
        yield {
            "ph": "C",
            "cat": OURS,
            "name": f"{one.counter} bytes",
            "pid": one.rank,
            "tid": 0,
            "ts": one.time_s * 1e6,
            "args": {"bytes": one.nbytes},
        }


def _counter(event: Event) -> str:
    return str(event["name"]).removesuffix(" bytes")


def _flows(timeline: Timeline) -> Iterator[Event]:
    tids = _tids(timeline)
    for number, flow in enumerate(timeline.flows):
        kinds = ["s", *"t" * (len(flow.points) - 2), "f"]
        for kind, point in zip(kinds, flow.points, strict=True):
            event = {
                "ph": kind,
                "cat": OURS,
                "name": flow.name,
                "id": flow.rank * FLOWS_OF_A_RANK + number,
                "pid": flow.rank,
                "tid": tids[flow.rank, point.track],
                "ts": point.time_s * 1e6,
            }
            yield event | ({"bp": "e"} if kind == "f" else {})
