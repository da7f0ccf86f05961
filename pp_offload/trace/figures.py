"""Steps of a trace by rank: times, waits by cause, rates and peaks."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from pp_offload.trace import timeline as tl
from pp_offload.trace.timeline import Span, Timeline

Interval = tuple[float, float]


class Kind(enum.Enum):
    """Kind of a span, as legends and tables show it; known by its track, name or last word."""

    OPERATORS = "other compute", tl.OPERATORS
    FORWARD = "forward", "(forward)"
    BACKWARD = "backward", "(backward)"
    OFFLOAD = "offload (d2h)", tl.D2H
    RELOAD = "reload (h2d)", tl.H2D
    WRITE = "write to disk", "write"
    READ = "read from disk", "read"
    WAITS_FOR_RELOAD = "waits for a reload", "(reload)"
    WAITS_FOR_OFFLOAD = "waits for an offload", "(offload)"
    WAITS_FOR_DISK = "waits for a disk", tl.WAITS_FOR_UNKNOWN
    WAITS_FOR_RANK = "waits for other ranks", tl.WAITS_FOR_OTHERS

    key: str

    def __new__(cls, text: str, key: str) -> Kind:
        kind = object.__new__(cls)
        kind._value_, kind.key = text, key
        return kind


WAITS_FOR_COPIES = (Kind.WAITS_FOR_RELOAD, Kind.WAITS_FOR_OFFLOAD, Kind.WAITS_FOR_DISK)
WAITS = (*WAITS_FOR_COPIES, Kind.WAITS_FOR_RANK)
COPIES = (Kind.OFFLOAD, Kind.RELOAD, Kind.WRITE, Kind.READ)
_KINDS = {kind.key: kind for kind in Kind}


def merged(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Sort intervals, and join those that overlap or are at most ``gap`` apart."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1] + gap:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def common(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Return the intersection of two sets of intervals."""
    sets = (*merged(a), *merged(b))
    edges = [edge for begin, end in sets for edge in ((begin, 1), (end, -1))]
    both, depth, begin = [], 0, 0.0
    for at, sign in sorted(edges):
        if depth == 2 and begin < at:
            both.append((begin, at))
        depth, begin = depth + sign, at
    return both


@dataclass(frozen=True)
class RankStep:
    """One step of one rank, in seconds and bytes: to the next step, or the recording's end.

    ``facts`` are the arguments of the step's span, and ``spans`` those that begin in the step. The
    times of groups' compute are those of operators, where these are known, as on a virtual device.
    ``values`` has the times and values of each counter, also at the begin and at the end.
    """

    rank: int
    begin_s: float
    end_s: float
    facts: Mapping[str, Any]
    spans: dict[Kind, list[Span]]
    times: dict[Kind, list[Interval]]
    values: dict[str, list[tuple[float, int]]]

    def seconds_of(self, *kinds: Kind) -> float:
        """Sum the times of these kinds."""
        return sum(end - begin for kind in kinds for begin, end in self.times[kind])

    def copied(self, kind: Kind) -> tuple[int, float | None]:
        """Return bytes and rate of the copies, writes or reads that began in the step.

        The rate is in bytes per second of copying; None without copies.
        """
        nbytes = sum(span.args["bytes"] for span in self.spans[kind])
        seconds = sum(span.end_s - span.begin_s for span in self.spans[kind])
        return nbytes, nbytes / seconds if seconds else None

    @property
    def worked_s(self) -> float | None:
        """From the begin to the end of the last work; None except for a virtual device."""
        work = self.times[Kind.OPERATORS]
        return work[-1][1] - self.begin_s if work else None

    @property
    def waited_s(self) -> dict[Kind, float]:
        """Time in which compute waited, by cause."""
        return {kind: self.seconds_of(kind) for kind in WAITS}

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Most bytes of each counter; of the device, also between readings, if known."""
        peaks = {name: max(n for _, n in line) for name, line in self.values.items() if line}
        if "device_peak_bytes" in self.facts:
            peaks[tl.DEVICE] = max(peaks.get(tl.DEVICE, 0), self.facts["device_peak_bytes"])
        return peaks

    def as_dict(self) -> dict[str, Any]:
        """Make plain figures, which JSON can hold."""
        copied = {kind: self.copied(kind) for kind in COPIES}
        return {
            "rank": self.rank,
            "seconds": self.end_s - self.begin_s,
            "busy_s": self.seconds_of(Kind.OPERATORS) or None,
            "worked_s": self.worked_s,
            "waited_s": {kind.value: seconds for kind, seconds in self.waited_s.items()},
            "copied_bytes": {kind.value: nbytes for kind, (nbytes, _) in copied.items()},
            "bytes_per_s": {kind.value: rate for kind, (_, rate) in copied.items()},
            "on_demand_reloads": self.facts.get("on_demand_reloads"),
            "peak_bytes": self.peak_bytes,
        }


def numbers_of_steps(timeline: Timeline) -> list[int]:
    """List the numbers of the steps, each once."""
    return sorted({int(span.args["step"]) for span in timeline.spans if span.track == tl.STEPS})


def rank_steps(timeline: Timeline, step: int | None = None) -> dict[int, RankStep]:
    """Return the step of each rank that has it; the last step for None.

    Raises:
        ValueError: The trace has no such step, or none at all.
    """
    steps = numbers_of_steps(timeline)
    if not steps:
        raise ValueError("the trace has no step, expected one that ended while it was recorded")
    if step is not None and step not in steps:
        raise ValueError(f"step is {step}, expected one of the trace: {steps}")
    number = steps[-1] if step is None else step
    spans = [each for rank in timeline.ranks for each in timeline.of(rank, tl.STEPS)]
    return {each.rank: _rank_step(timeline, each) for each in spans if each.args["step"] == number}


def _rank_step(timeline: Timeline, step: Span) -> RankStep:
    rank, begin_s, end_s = step.rank, step.begin_s, step.end_s
    later = [each.begin_s for each in timeline.of(rank, tl.STEPS) if each.begin_s > begin_s]
    until_s = min(later, default=inf)  # copies of the last step may begin behind its compute
    inside: dict[Kind, list[Span]] = {kind: [] for kind in Kind}
    times: dict[Kind, list[Interval]] = {kind: [] for kind in Kind}
    for span in timeline.spans:
        keys = span.track, span.name, span.name.split(" ")[-1]
        kind = next((_KINDS[key] for key in keys if key in _KINDS), None)
        if span.rank == rank and kind is not None:
            times[kind].append((span.begin_s, span.end_s))
            if begin_s <= span.begin_s < until_s:
                inside[kind].append(span)
    times = {kind: common(each, [(begin_s, end_s)]) for kind, each in times.items()}
    for kind in (Kind.FORWARD, Kind.BACKWARD) if times[Kind.OPERATORS] else ():
        times[kind] = common(times[kind], times[Kind.OPERATORS])
    values = {}
    for name in tl.COUNTERS:
        line = [(s.time_s, s.nbytes) for s in timeline.counter(rank, name) if s.time_s < end_s]
        before = [(begin_s, nbytes) for time_s, nbytes in line if time_s <= begin_s][-1:]
        line = before + [sample for sample in line if sample[0] > begin_s]
        values[name] = line + [(end_s, nbytes) for _, nbytes in line[-1:]]
    return RankStep(rank, begin_s, end_s, step.args, inside, times, values)
