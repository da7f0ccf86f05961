"""What a step of a trace came to: times, waits by cause, rates and peaks, rank by rank.

steps = steps_of(timeline)                     # {1: {0: (0.003, 0.007), ...}}: by rank
found = figures_of(timeline, 1)                # of the ranks that have it
found[0].waited_s[Kind.WAITS_FOR_RELOAD]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pp_offload.trace.events import COUNTERS, DEVICE, OPERATORS, STEPS, Span, Timeline
from pp_offload.trace.intervals import Interval, common, total, without
from pp_offload.trace.kinds import WAITS, Kind, kind_of


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """Of one rank in one step. All times are in seconds."""

    rank: int

    seconds: float
    """From the begin of the step to that of the next one, or to the end of the recording."""

    busy_s: float | None
    """How long compute worked; None where only a virtual device could say it."""

    worked_s: float | None = None
    """From the begin of the step until compute last worked; None where only a virtual device could
    say it.
    """

    waited_s: Mapping[Kind, float]
    """How long compute waited, by cause."""

    offloaded_bytes: int
    reloaded_bytes: int
    """In copies that began in the step."""

    offload_s: float
    reload_s: float
    """How long these copies took."""

    written_bytes: int
    read_bytes: int
    """To the disk and from there."""

    on_demand_reloads: int | None
    """Payloads that came only when backward was at their group; None if the trace does not say."""

    peak_bytes: Mapping[str, int]
    """The most of each counter that the trace has. Of the device's, also between the times at which
    counters were read, where the device has told.
    """

    at_peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """What the other counters said where that of the device said most; empty if it says nothing."""

    @property
    def offload_bytes_per_s(self) -> float | None:
        """While it copied; None if it never did."""
        return self.offloaded_bytes / self.offload_s if self.offload_s else None

    @property
    def reload_bytes_per_s(self) -> float | None:
        """While it copied; None if it never did."""
        return self.reloaded_bytes / self.reload_s if self.reload_s else None


def steps_of(timeline: Timeline) -> dict[int, dict[int, Interval]]:
    """When each step was, by its number and by rank."""
    found: dict[int, dict[int, Interval]] = {}
    for span in sorted(timeline.spans, key=lambda one: one.rank):
        if span.track == STEPS:
            number = int(span.args["step"])
            found.setdefault(number, {})[span.rank] = span.begin_s, span.end_s
    return dict(sorted(found.items()))


def checked_step(timeline: Timeline, step: int | None) -> int:
    """The number of a step that a trace has: the last one when None.

    Raises:
        ValueError: It has no such step, or none at all.
    """
    steps = list(steps_of(timeline))
    if not steps:
        raise ValueError("the trace has no step, expected one that ended while it was recorded")
    if step is not None and step not in steps:
        raise ValueError(f"step is {step}, expected one of the trace: {steps}")
    return steps[-1] if step is None else step


def figures_of(timeline: Timeline, step: int) -> list[RankFigures]:
    """Of all ranks that have the step.

    Args:
        timeline: Of a real run, or of a virtual one.
        step: One of :func:`steps_of`.
    """
    windows = steps_of(timeline)[step]
    spans = spans_by_rank(timeline)
    return [
        _figures(timeline, rank, window, spans.get(rank, [])) for rank, window in windows.items()
    ]


def spans_by_rank(timeline: Timeline) -> dict[int, list[Span]]:
    """All spans, in the order in which they are."""
    found: dict[int, list[Span]] = {}
    for span in timeline.spans:
        found.setdefault(span.rank, []).append(span)
    return found


def times_of(spans: Sequence[Span], window: Interval) -> dict[Kind, list[Interval]]:
    """When a rank did what, in a window. Forward and backward do not work while compute waits.

    On a virtual device it is known when operators ran: of forward and backward, that is counted.
    """
    found: dict[Kind, list[Interval]] = {kind: [] for kind in Kind}
    for span in spans:
        kind = kind_of(span)
        if kind is not None:
            found[kind].append((span.begin_s, span.end_s))
    found = {kind: common(times, [window]) for kind, times in found.items()}
    groups = found[Kind.FORWARD] + found[Kind.BACKWARD]
    if any(span.track == OPERATORS for span in spans):
        worked = found[Kind.OPERATORS]
        found[Kind.FORWARD] = common(found[Kind.FORWARD], worked)
        found[Kind.BACKWARD] = common(found[Kind.BACKWARD], worked)
        found[Kind.OPERATORS] = without(worked, groups)
    waits = [one for kind in WAITS for one in found[kind]]
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        found[kind] = without(found[kind], waits)
    return found


def _figures(timeline: Timeline, rank: int, window: Interval, spans: Sequence[Span]) -> RankFigures:
    times = times_of(spans, window)
    worked = [(one.begin_s, one.end_s) for one in spans if one.track == OPERATORS]
    worked = common(worked, [window])
    sent, back = (_copied(spans, kind, window) for kind in (Kind.OFFLOAD, Kind.RELOAD))
    return RankFigures(
        rank=rank,
        seconds=window[1] - window[0],
        busy_s=total(worked) if worked else None,
        worked_s=max(end_s for _, end_s in worked) - window[0] if worked else None,
        waited_s={kind: total(times[kind]) for kind in WAITS},
        offloaded_bytes=sent[0],
        reloaded_bytes=back[0],
        offload_s=sent[1],
        reload_s=back[1],
        written_bytes=_copied(spans, Kind.WRITE, window)[0],
        read_bytes=_copied(spans, Kind.READ, window)[0],
        on_demand_reloads=_step_at(spans, window).get("on_demand_reloads"),
        peak_bytes=_peaks(timeline, rank, window, spans),
        at_peak_bytes=_at_peak(timeline, rank, window),
    )


def _step_at(spans: Sequence[Span], window: Interval) -> Mapping[str, Any]:
    """What the step with this window says of itself."""
    found = [one.args for one in spans if one.track == STEPS and one.begin_s == window[0]]
    return found[0] if found else {}


def _copied(spans: Sequence[Span], kind: Kind, window: Interval) -> tuple[int, float]:
    """Bytes and seconds of the copies that began in a window."""
    begin_s, end_s = window
    copies = [one for one in spans if kind_of(one) is kind and begin_s <= one.begin_s < end_s]
    nbytes = sum(int(one.args["bytes"]) for one in copies)
    return nbytes, sum(one.args.get("busy_s", one.end_s - one.begin_s) for one in copies)


def _peaks(
    timeline: Timeline, rank: int, window: Interval, spans: Sequence[Span]
) -> dict[str, int]:
    """The most in a window; what was said last before it holds at its begin."""
    found: dict[str, int] = {}
    for counter in COUNTERS:
        samples = timeline.counter(rank, counter)
        before = [one.nbytes for one in samples if one.time_s <= window[0]][-1:]
        inside = [one.nbytes for one in samples if window[0] < one.time_s < window[1]]
        if before or inside:
            found[counter] = max(before + inside)
    told = _step_at(spans, window).get("device_peak_bytes")
    if told is not None:
        found[DEVICE] = max(found.get(DEVICE, 0), int(told))
    return found


def _at_peak(timeline: Timeline, rank: int, window: Interval) -> dict[str, int]:
    """What the other counters said where that of the device said most."""
    device = timeline.counter(rank, DEVICE)
    inside = [one for one in device if window[0] <= one.time_s < window[1]]
    if not inside:
        return {}
    time_s = max(inside, key=lambda one: one.nbytes).time_s
    found: dict[str, int] = {}
    for counter in COUNTERS:
        before = [one.nbytes for one in timeline.counter(rank, counter) if one.time_s <= time_s]
        if before and counter != DEVICE:
            found[counter] = before[-1]
    return found
