"""Timelines as Chrome trace files, which Perfetto opens; files of several ranks as one.

    write(timeline, "out.json.gz")                        # compressed, because of the name
    read("out.rank0.json.gz", "out.rank1.json.gz")        # one timeline of both ranks
    merge_ranks([part_of("out.json.gz", rank) for rank in range(2)], "out.json.gz")

A rank is a process of the file, a track is a thread. Times are microseconds since
``baseTimeNanoseconds`` on the wall clock, by which the ranks of a run are merged.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from glob import escape
from pathlib import Path
from typing import Any

from pp_offload.trace.timeline import TRACKS, Sample, Span, Timeline

OURS, BASE = "pp_offload", "baseTimeNanoseconds"

Json = dict[str, Any]
AnyPath = str | os.PathLike[str]


def write(timeline: Timeline, path: AnyPath) -> None:
    """Write a file, compressed if its name ends in ``.gz``."""
    ranks = {str(rank): timeline.metadata[rank] for rank in timeline.ranks}
    content: Json = {"schemaVersion": 1, "displayTimeUnit": "ms", BASE: timeline.base_ns}
    content |= {OURS: ranks, "traceEvents": list(_events(timeline))}
    data = json.dumps(content, separators=(",", ":")).encode()
    Path(path).write_bytes(gzip.compress(data, 6) if Path(path).suffix == ".gz" else data)


def read(path: AnyPath, *others: AnyPath) -> Timeline:
    """Read a file, or the files of several ranks into one timeline.

    Raises:
        FileNotFoundError: No such file. The message names files of single ranks that exist.
        ValueError: A file was not written by a Trace, or two files have the same rank.
    """
    contents = [_read(each) for each in (path, *others)]
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


def _read(path: AnyPath) -> Json:
    if not Path(path).is_file():
        text = f"found no file {path}, expected one that a Trace has written"
        pattern = part_of(escape(os.fspath(path)), "*")
        if parts := sorted(part.name for part in pattern.parent.glob(pattern.name)):
            text += f"; found {', '.join(parts)}: give these instead, or merge them with "
            text += "merge_ranks()"
        raise FileNotFoundError(text)
    try:
        data = Path(path).read_bytes()
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        if isinstance(content, dict) and OURS in content:
            return content
        problem = f"no key {OURS}"
    except (gzip.BadGzipFile, zlib.error, EOFError, ValueError) as failure:
        problem = str(failure)
    raise ValueError(
        f"{path} cannot be read as a trace, expected a file that a Trace has written ({problem})"
    )


def _events(timeline: Timeline) -> Iterator[Json]:
    """Yield the events of a file: names of ranks and tracks, then spans and samples."""
    used = sorted({(span.rank, span.track) for span in timeline.spans})
    more_tracks = sorted({track for _, track in used} - set(TRACKS))
    tids = {track: tid for tid, track in enumerate([*TRACKS, *more_tracks])}
    labels = [("process", rank, 0, f"rank {rank}", rank) for rank in timeline.ranks]
    labels += [("thread", rank, tids[track], track, tids[track]) for rank, track in used]
    for kind, rank, tid, name, index in labels:
        yield _event("M", f"{kind}_name", rank, tid, 0, {"name": name})
        yield _event("M", f"{kind}_sort_index", rank, tid, 0, {"sort_index": index})
    for span in timeline.spans:
        place = span.rank, tids[span.track], span.begin_s
        dur = (span.end_s - span.begin_s) * 1e6
        yield _event("X", span.name, *place, dict(span.args)) | {"dur": dur}
    for item in timeline.samples:
        name, args = f"{item.counter} bytes", {"bytes": item.nbytes}
        yield _event("C", name, item.rank, 0, item.time_s, args)


def _event(kind: str, name: str, rank: int, tid: int, time_s: float, args: Json) -> Json:
    common: Json = {"ph": kind, "cat": OURS, "name": name, "pid": rank, "tid": tid}
    return common | {"ts": time_s * 1e6, "args": args}


def _timeline(content: Json, shift_s: float) -> Timeline:
    ranks = {int(rank): facts for rank, facts in content[OURS].items()}
    timeline = Timeline(content[BASE], metadata=ranks)
    tracks: dict[tuple[int, int], str] = {}
    for event in content["traceEvents"]:
        rank, name, args = event["pid"], event["name"], event["args"]
        time_s = event["ts"] / 1e6 + shift_s
        if name == "thread_name":
            tracks[rank, event["tid"]] = args["name"]
        elif event["ph"] == "X":
            track, end_s = tracks[rank, event["tid"]], time_s + event["dur"] / 1e6
            timeline.spans.append(Span(rank, track, name, time_s, end_s, args))
        elif event["ph"] == "C":
            counter = name.removesuffix(" bytes")
            timeline.samples.append(Sample(rank, counter, time_s, args["bytes"]))
    return timeline
