"""Figures of a step of a trace: times, waits by cause, rates and peaks of each rank.

step = checked_step(timeline, None)                  # the last one
figures = figures_of(timeline, step)[0]
figures.waited_s[Kind.WAITS_FOR_RELOAD]
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pp_offload.trace import timeline as tl
from pp_offload.trace.timeline import Span, Timeline

Interval = tuple[float, float]


class Kind(enum.Enum):
    """Kind of a span, as legends and tables show it."""

    OPERATORS = "other compute"
    FORWARD = "forward"
    BACKWARD = "backward"
    OFFLOAD = "offload (d2h)"
    RELOAD = "reload (h2d)"
    WRITE = "write to disk"
    READ = "read from disk"
    WAITS_FOR_RELOAD = "waits for a reload"
    WAITS_FOR_OFFLOAD = "waits for an offload"
    WAITS_FOR_DISK = "waits for a disk"
    WAITS_FOR_RANK = "waits for other ranks"


WAITS_FOR_COPIES = (Kind.WAITS_FOR_RELOAD, Kind.WAITS_FOR_OFFLOAD, Kind.WAITS_FOR_DISK)
WAITS = (*WAITS_FOR_COPIES, Kind.WAITS_FOR_RANK)
COPIES = (Kind.OFFLOAD, Kind.RELOAD, Kind.WRITE, Kind.READ)

_KINDS = {
    tl.D2H: Kind.OFFLOAD,
    tl.H2D: Kind.RELOAD,
    tl.OPERATORS: Kind.OPERATORS,
    "write": Kind.WRITE,
    "read": Kind.READ,
    tl.WAITS_FOR_UNKNOWN: Kind.WAITS_FOR_DISK,
    tl.WAITS_FOR_OTHERS: Kind.WAITS_FOR_RANK,
    "(forward)": Kind.FORWARD,
    "(backward)": Kind.BACKWARD,
    "(reload)": Kind.WAITS_FOR_RELOAD,
    "(offload)": Kind.WAITS_FOR_OFFLOAD,
}
"""Kinds by track, by name and by last word."""


def kind_of(span: Span) -> Kind | None:
    """Return the kind of a span; None for a step."""
    keys = span.track, span.name, span.name.split(" ")[-1]
    return next((_KINDS[key] for key in keys if key in _KINDS), None)


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


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """Figures of one rank in one step, in seconds and bytes.

    Attributes:
        seconds: From the begin of the step to the next one, or to the end of the recording.
        busy_s: Time in which compute worked; None except for a virtual device, as for ``worked_s``.
        worked_s: From the begin of the step to the end of the last work of compute.
        waited_s: Time in which compute waited, by cause.
        copied_bytes: Bytes of copies, reads and writes that began in the step.
        bytes_per_s: Rates while copying.
        on_demand_reloads: Tensors that came back only when backward was at their group.
        peak_bytes: Most bytes of each counter; of the device, also between readings, if known.
    """

    rank: int
    seconds: float
    busy_s: float | None
    worked_s: float | None
    waited_s: Mapping[Kind, float]
    copied_bytes: Mapping[Kind, int]
    bytes_per_s: Mapping[Kind, float]
    on_demand_reloads: int | None
    peak_bytes: Mapping[str, int]

    @property
    def waited_for_copies_s(self) -> float:
        """Time that compute waited for copies."""
        return sum(self.waited_s[kind] for kind in WAITS_FOR_COPIES)

    def as_dict(self) -> dict[str, Any]:
        """Make plain figures in seconds and bytes, which JSON can hold."""
        maps = {"waited_s": self.waited_s, "copied_bytes": self.copied_bytes}
        maps |= {"bytes_per_s": self.bytes_per_s}
        plain = {name: {kind.value: n for kind, n in each.items()} for name, each in maps.items()}
        return vars(self) | plain


def steps_of(timeline: Timeline) -> dict[int, dict[int, Interval]]:
    """Return begin and end of each step, by number and rank."""
    steps: dict[int, dict[int, Interval]] = {}
    for span in sorted(timeline.spans, key=lambda span: span.rank):
        if span.track == tl.STEPS:
            steps.setdefault(int(span.args["step"]), {})[span.rank] = span.begin_s, span.end_s
    return dict(sorted(steps.items()))


def checked_step(timeline: Timeline, step: int | None) -> int:
    """Check the number of a step; return the last step for None.

    Raises:
        ValueError: The trace has no such step, or none at all.
    """
    steps = list(steps_of(timeline))
    if not steps:
        raise ValueError("the trace has no step, expected one that ended while it was recorded")
    if step is not None and step not in steps:
        raise ValueError(f"step is {step}, expected one of the trace: {steps}")
    return steps[-1] if step is None else step


def values_of(
    timeline: Timeline, rank: int, counter: str, window: Interval
) -> list[tuple[float, int]]:
    """Return times and values of a counter in a window, with those at its begin and end."""
    begin_s, end_s = window
    samples = [(s.time_s, s.nbytes) for s in timeline.counter(rank, counter) if s.time_s < end_s]
    before = [(begin_s, nbytes) for time_s, nbytes in samples if time_s <= begin_s][-1:]
    values = before + [sample for sample in samples if sample[0] > begin_s]
    return values + [(end_s, nbytes) for _, nbytes in values[-1:]]


def figures_of(timeline: Timeline, step: int) -> list[RankFigures]:
    """Make the figures of all ranks that have the step."""
    windows = steps_of(timeline)[step].items()
    return [_figures(timeline, rank, window) for rank, window in windows]


def times_of(spans: Iterable[Span], window: Interval) -> dict[Kind, list[Interval]]:
    """Return the times of each kind in a window.

    Compute of groups is that of operators, where those are known, as on a virtual device.
    """
    times: dict[Kind, list[Interval]] = {kind: [] for kind in Kind}
    for span in spans:
        if (kind := kind_of(span)) is not None:
            times[kind].append((span.begin_s, span.end_s))
    times = {kind: common(each, [window]) for kind, each in times.items()}
    for kind in (Kind.FORWARD, Kind.BACKWARD) if times[Kind.OPERATORS] else ():
        times[kind] = common(times[kind], times[Kind.OPERATORS])
    return times


def _figures(timeline: Timeline, rank: int, window: Interval) -> RankFigures:
    begin_s, end_s = window
    spans = [span for span in timeline.spans if span.rank == rank]
    times = times_of(spans, window)
    total_s = {kind: sum(end - begin for begin, end in each) for kind, each in times.items()}
    nbytes, took_s = dict.fromkeys(COPIES, 0), dict.fromkeys(COPIES, 0.0)
    facts: Mapping[str, Any] = {}
    for span in spans:
        kind = kind_of(span)
        if span.track == tl.STEPS and span.begin_s == begin_s:
            facts = span.args
        elif kind in COPIES and begin_s <= span.begin_s < end_s:
            nbytes[kind] += span.args["bytes"]
            took_s[kind] += span.end_s - span.begin_s
    worked = times[Kind.OPERATORS]
    values = {name: values_of(timeline, rank, name, window) for name in tl.COUNTERS}
    peaks = {name: max(n for _, n in items) for name, items in values.items() if items}
    if "device_peak_bytes" in facts:
        peaks[tl.DEVICE] = max(peaks.get(tl.DEVICE, 0), facts["device_peak_bytes"])
    return RankFigures(
        rank=rank,
        seconds=end_s - begin_s,
        busy_s=total_s[Kind.OPERATORS] if worked else None,
        worked_s=worked[-1][1] - begin_s if worked else None,
        waited_s={kind: total_s[kind] for kind in WAITS},
        copied_bytes=nbytes,
        bytes_per_s={kind: nbytes[kind] / took_s[kind] for kind in COPIES if took_s[kind]},
        on_demand_reloads=facts.get("on_demand_reloads"),
        peak_bytes=peaks,
    )
