"""Timeline of a trace, and its Chrome trace file, which Perfetto opens.

    timeline = read("out.rank0.json.gz", "out.rank1.json.gz")   # one timeline of both ranks
    timeline.of(0, "d2h")                                       # copies of rank 0 to the host
    timeline.counter(0, "host")                                 # bytes of its host memory
    write(timeline, "out.json.gz")                              # compressed, because of the name

All times are seconds since the base of the timeline: one clock for all ranks and tracks. In the
file a rank is a process, a track is a thread, and times are microseconds since
``baseTimeNanoseconds`` on the wall clock, by which the ranks of a run are merged.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS, COMPUTE, OPERATORS = "steps", "compute", "operators"
D2H, H2D, DISK = "d2h", "h2d", "disk"
TRACKS = (STEPS, COMPUTE, OPERATORS, D2H, H2D, DISK)  # as displayed; others come after them

DEVICE, HOST, IN_FLIGHT, RELOADED = "device", "host", "in flight", "reloaded"
COUNTERS = (DEVICE, HOST, IN_FLIGHT, RELOADED)

WAITS_FOR_UNKNOWN = "waits for a disk or an older copy"
WAITS_FOR_OTHERS = "waits for other work"

OURS, BASE = "pp_offload", "baseTimeNanoseconds"

Json = dict[str, Any]
AnyPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Span:
    """Span of work, of a copy or of a wait; ``args`` are plain values, such as ``bytes``."""

    rank: int
    track: str
    name: str
    begin_s: float
    end_s: float
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """Value of a counter from a time on."""

    rank: int
    counter: str
    time_s: float
    nbytes: int


@dataclass
class Timeline:
    """Content of a trace.

    Attributes:
        base_ns: Wall clock at second 0, in nanoseconds; 0 for a virtual run.
        metadata: Facts of each rank: ``device``, ``has_captures``.
    """

    base_ns: int
    spans: list[Span] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    metadata: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        return sorted(self.metadata)

    def of(self, rank: int, track: str) -> list[Span]:
        """List the spans of a track, sorted by begin."""
        spans = [span for span in self.spans if (span.rank, span.track) == (rank, track)]
        return sorted(spans, key=lambda span: (span.begin_s, -span.end_s))

    def counter(self, rank: int, name: str) -> list[Sample]:
        """List the samples of a counter, sorted by time."""
        samples = [item for item in self.samples if (item.rank, item.counter) == (rank, name)]
        return sorted(samples, key=lambda item: item.time_s)

    def add(self, other: Timeline) -> None:
        """Add the ranks of another timeline with the same base.

        Raises:
            ValueError: Both have the same rank.
        """
        if both := self.metadata.keys() & other.metadata.keys():
            raise ValueError(f"rank {min(both)} is in two of the traces, expected each rank once")
        self.spans += other.spans
        self.samples += other.samples
        self.metadata |= other.metadata


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
        FileNotFoundError: No such file.
        ValueError: A file was not written by a Trace, or two files have the same rank.
    """
    contents = [_read(each) for each in (path, *others)]
    whole = Timeline(min(content[BASE] for content in contents))
    for content in contents:
        whole.add(_timeline(content, shift_s=(content[BASE] - whole.base_ns) / 1e9))
    return whole


def part_of(path: AnyPath, rank: int) -> Path:
    """Make the path of the file of one rank: ``out.rank3.json.gz`` for ``out.json.gz``."""
    stem, dot, suffixes = Path(path).name.partition(".")
    return Path(path).with_name(f"{stem}.rank{rank}{dot}{suffixes}")


def merge_ranks(paths: Sequence[AnyPath], out: AnyPath) -> Timeline:
    """Write the files of ranks of a run as one file; see :func:`read`. No rank need be running."""
    whole = read(*paths)
    write(whole, out)
    return whole


def _read(path: AnyPath) -> Json:
    if not Path(path).is_file():
        expected = "expected one that a Trace has written; of several ranks each has its own"
        raise FileNotFoundError(f"found no file {path}, {expected}, such as out.rank0.json")
    try:
        data = Path(path).read_bytes()
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        if isinstance(content, dict) and OURS in content:
            return content
        problem = f"no key {OURS}"
    except (gzip.BadGzipFile, zlib.error, EOFError, ValueError) as failure:
        problem = str(failure)
    expected = f"expected a file that a Trace has written ({problem})"
    raise ValueError(f"{path} cannot be read as a trace, {expected}")


def _events(timeline: Timeline) -> Iterator[Json]:
    """Yield the events of a file: names of ranks and tracks, then spans and samples."""
    used = sorted({(span.rank, span.track) for span in timeline.spans})
    tracks = dict.fromkeys((*TRACKS, *(track for _, track in used)))
    tids = {track: tid for tid, track in enumerate(tracks)}
    labels = [("process", rank, 0, f"rank {rank}", rank) for rank in timeline.ranks]
    labels += [("thread", rank, tids[track], track, tids[track]) for rank, track in used]
    for kind, rank, tid, name, index in labels:
        yield _event("M", f"{kind}_name", rank, tid, 0, {"name": name})
        yield _event("M", f"{kind}_sort_index", rank, tid, 0, {"sort_index": index})
    for span in timeline.spans:
        event = _event("X", span.name, span.rank, tids[span.track], span.begin_s, dict(span.args))
        yield event | {"dur": (span.end_s - span.begin_s) * 1e6}
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
