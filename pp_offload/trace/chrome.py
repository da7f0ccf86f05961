"""Timelines as Chrome trace files, which Perfetto opens; files of several ranks as one.

    write(timeline, "out.json.gz")                        # compressed, because of the name
    read("out.rank0.json.gz", "out.rank1.json.gz")        # one timeline of both ranks
    merge_ranks([part_of("out.json.gz", rank) for rank in range(2)], "out.json.gz")
    merge("out.json.gz", ["profiled.json"], "both.json.gz")  # with a file of torch.profiler

A rank is a process of the file, a track is a thread. Times are microseconds since
``baseTimeNanoseconds`` on the wall clock, as in files of ``torch.profiler``, so files merge without
a guess.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from glob import escape
from pathlib import Path
from typing import Any

from pp_offload.trace.timeline import TRACKS, Flow, Point, Sample, Span, Timeline

OURS, BASE = "pp_offload", "baseTimeNanoseconds"

FLOWS_OF_A_RANK, FOREIGN_PROCESSES = 2**32, 2**20
"""Offsets that keep numbers apart: more than a rank has flows, and than a system has processes."""

Json = dict[str, Any]
AnyPath = str | os.PathLike[str]


def write(timeline: Timeline, path: AnyPath) -> None:
    """Write a file, compressed if its name ends in ``.gz``."""
    ranks = {str(rank): timeline.metadata[rank] for rank in timeline.ranks}
    events = list(_events(timeline))
    head = {"schemaVersion": 1, "displayTimeUnit": "ms", BASE: timeline.base_ns, OURS: ranks}
    _write_json(head | {"traceEvents": events}, path)


def read(path: AnyPath, *others: AnyPath) -> Timeline:
    """Read a file, or the files of several ranks into one timeline.

    Raises:
        FileNotFoundError: No such file. The message names files of single ranks that exist.
        ValueError: A file was not written by a Trace, or two files have the same rank.
    """
    contents = [_read_ours(each) for each in (path, *others)]
    whole = Timeline(min(content[BASE] for content in contents))
    for content in contents:
        whole.add(_timeline(content, shift_s=(content[BASE] - whole.base_ns) / 1e9))
    return whole


def part_of(path: AnyPath, rank: int | str) -> Path:
    """Make the path of the file of one rank: ``out.rank3.json.gz`` for ``out.json.gz``."""
    stem, dot, suffixes = Path(path).name.partition(".")
    return Path(path).with_name(f"{stem}.rank{rank}{dot}{suffixes}")


def merge_ranks(paths: Sequence[AnyPath], out: AnyPath) -> Timeline:
    """Write the files of all ranks of a run as one file. The ranks need not be running.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: The files are not those of all ranks of one run, each once.
    """
    if not paths:
        raise ValueError("no trace to merge, expected one for each rank")
    whole = read(*paths)
    expected = {facts.get("num_ranks", 1) for facts in whole.metadata.values()}
    if expected != {len(whole.ranks)} or whole.ranks != list(range(len(whole.ranks))):
        raise ValueError(
            f"the traces are of ranks {whole.ranks} of runs of {sorted(expected)} ranks, expected "
            "those of all ranks of one run"
        )
    write(whole, out)
    return whole


def merge(ours: AnyPath, profilers: Sequence[AnyPath], out: AnyPath) -> None:
    """Write a trace and files of ``torch.profiler.export_chrome_trace`` as one file.

    Raises:
        ValueError: ``ours`` is of a virtual run, or a file has no base time.
    """
    contents = [_read_ours(ours), *map(_read_json, profilers)]
    for path, content in zip((ours, *profilers), contents, strict=True):
        if not content.get(BASE):
            raise ValueError(f"{path} has no {BASE}, expected a real run, or a file of a profiler")
    ranks, base_ns = set(map(int, contents[0][OURS])), min(int(each[BASE]) for each in contents)
    whole = {key: value for content in reversed(contents) for key, value in content.items()}
    whole |= {BASE: base_ns, "traceEvents": []}
    for number, content in enumerate(contents):
        for event in content["traceEvents"]:
            if "ts" in event:
                event["ts"] += (int(content[BASE]) - base_ns) / 1e3
            if number and event.get("pid") in ranks:  # another process with the number of a rank
                event["pid"] += FOREIGN_PROCESSES * number
        whole["traceEvents"] += content["traceEvents"]
    _write_json(whole, out)


def _write_json(content: Json, path: AnyPath) -> None:
    """Write a file, which replaces an older one only when complete."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    data = json.dumps(content, separators=(",", ":")).encode()
    try:
        partial.write_bytes(gzip.compress(data, 6) if target.suffix == ".gz" else data)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _read_json(path: AnyPath, key: str = "traceEvents") -> Json:
    """Read the content of a file that has this key."""
    try:
        data = Path(path).read_bytes()
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        if isinstance(content, dict) and key in content:
            return content
        problem = f"no key {key}"
    except (gzip.BadGzipFile, zlib.error, EOFError, ValueError) as failure:
        problem = str(failure)
    raise ValueError(
        f"{path} cannot be read as a trace, expected a file that a Trace has written ({problem})"
    )


def _read_ours(path: AnyPath) -> Json:
    if Path(path).is_file():
        return _read_json(path, OURS)
    text = f"found no file {path}, expected one that a Trace has written"
    pattern = part_of(escape(os.fspath(path)), "*")
    if parts := sorted(part.name for part in pattern.parent.glob(pattern.name)):
        text += f"; found {', '.join(parts)}: give these instead, or merge them with merge_ranks()"
    raise FileNotFoundError(text)


def _events(timeline: Timeline) -> Iterator[Json]:
    """Yield the events of a file: names of ranks and tracks, then spans, samples and flows."""
    points = [(flow.rank, point.track) for flow in timeline.flows for point in flow.points]
    used = sorted({(span.rank, span.track) for span in timeline.spans} | set(points))
    more_tracks = sorted({track for _, track in used} - set(TRACKS))
    tids = {track: tid for tid, track in enumerate([*TRACKS, *more_tracks])}
    labels = [("process", rank, 0, f"rank {rank}", rank) for rank in timeline.ranks]
    labels += [("thread", rank, tids[track], track, tids[track]) for rank, track in used]
    for kind, rank, tid, name, index in labels:
        yield _event("M", f"{kind}_name", rank, tid, 0, args={"name": name})
        yield _event("M", f"{kind}_sort_index", rank, tid, 0, args={"sort_index": index})
    for span in timeline.spans:
        place = span.rank, tids[span.track], span.begin_s
        dur = (span.end_s - span.begin_s) * 1e6
        yield _event("X", span.name, *place, dur=dur, args=dict(span.args))
    for item in timeline.samples:
        args = {"bytes": item.nbytes}
        yield _event("C", f"{item.counter} bytes", item.rank, 0, item.time_s, args=args)
    for number, flow in enumerate(timeline.flows):
        kinds = ["s", *"t" * (len(flow.points) - 2), "f"]
        for kind, point in zip(kinds, flow.points, strict=True):
            # An arrow ends at the span around its end, not at the next span.
            ends: Json = {"bp": "e"} if kind == "f" else {}
            place = flow.rank, tids[point.track], point.time_s
            yield _event(kind, flow.name, *place, id=flow.rank * FLOWS_OF_A_RANK + number, **ends)


def _event(kind: str, name: str, rank: int, tid: int, time_s: float, **more: Any) -> Json:
    common = {"ph": kind, "cat": OURS, "name": name, "pid": rank, "tid": tid, "ts": time_s * 1e6}
    return common | more


def _timeline(content: Json, shift_s: float) -> Timeline:
    """Make the timeline of a file, without events of other programs."""
    ranks = {int(rank): facts for rank, facts in content[OURS].items()}
    timeline = Timeline(content[BASE], metadata=ranks)
    tracks: dict[tuple[int, int], str] = {}
    flows: dict[int, Flow] = {}
    for event in content["traceEvents"]:
        if event.get("cat") != OURS:
            continue
        rank, name, kind = event["pid"], event["name"], event["ph"]
        time_s = event["ts"] / 1e6 + shift_s
        if name == "thread_name":
            tracks[rank, event["tid"]] = event["args"]["name"]
        elif kind == "X":
            track, end_s = tracks[rank, event["tid"]], time_s + event["dur"] / 1e6
            timeline.spans.append(Span(rank, track, name, time_s, end_s, event["args"]))
        elif kind == "C":
            counter, nbytes = name.removesuffix(" bytes"), event["args"]["bytes"]
            timeline.samples.append(Sample(rank, counter, time_s, nbytes))
        elif kind in "stf":
            flow = flows.setdefault(event["id"], Flow(rank, name, ()))
            point = Point(tracks[rank, event["tid"]], time_s)
            flows[event["id"]] = replace(flow, points=(*flow.points, point))
    timeline.flows += flows.values()
    return timeline
