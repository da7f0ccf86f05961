"""What a picture shows of each rank, in numbers: how it is drawn is ``picture.py``'s.

for panel in panels_of(timeline, step, ranks, predicted):
    panel.times[Kind.FORWARD], panel.lines["host"]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pp_offload.trace.events import COUNTERS, Span, Timeline
from pp_offload.trace.figures import (
    RankFigures,
    checked_step,
    figures_of,
    spans_by_rank,
    steps_of,
    times_of,
)
from pp_offload.trace.intervals import Interval, merged
from pp_offload.trace.kinds import WAITS, WAITS_FOR_COPIES, Kind, kind_of

FINEST = 1 / 4000
"""Of the width: work that is nearer than that is drawn as one. Waits never are: each counts."""


@dataclass(frozen=True)
class Panel:
    """One rank."""

    figures: RankFigures
    times: dict[Kind, list[Interval]]
    longest: Span | None
    """The longest wait for a copy."""

    lines: dict[str, list[tuple[float, int]]]
    predicted: dict[str, list[tuple[float, int]]]
    """Bytes by counter over seconds from the begin of the step on."""

    predicted_s: float | None
    """How long the step should have taken."""

    shown_s: float
    """How much time is shown, of all ranks."""

    begin_s: float
    """Of what is shown, in the trace's time."""

    is_whole: bool
    """Whether the recording lost nothing."""


def panels_of(
    timeline: Timeline, step: int, ranks: Sequence[int], predicted: Timeline | None
) -> list[Panel]:
    """One for each rank.

    Args:
        timeline: Has the step on these ranks.
        step: Its number.
        ranks: In this order.
        predicted: Its last step is drawn over that one, begin over begin.
    """
    windows = {rank: steps_of(timeline)[step][rank] for rank in ranks}
    whole = _hull(windows.values())
    figures = {one.rank: one for one in figures_of(timeline, step)}
    spans = spans_by_rank(timeline)
    dashed: dict[int, Interval] = {}
    if predicted is not None:
        last = steps_of(predicted)[checked_step(predicted, None)]
        dashed = {rank: window for rank, window in last.items() if rank in windows}
    foretold = _hull(dashed.values())
    return [
        Panel(
            figures=figures[rank],
            times=_from_begin(times_of(spans.get(rank, []), windows[rank]), whole),
            longest=_longest_wait(spans.get(rank, []), windows[rank]),
            lines=_lines(timeline, rank, windows[rank], whole[0]),
            predicted=_lines(predicted, rank, dashed[rank], foretold[0])
            if predicted is not None and rank in dashed
            else {},
            predicted_s=dashed[rank][1] - foretold[0] if rank in dashed else None,
            shown_s=max(whole[1] - whole[0], foretold[1] - foretold[0]),
            begin_s=whole[0],
            is_whole=not timeline.metadata.get(rank, {}).get("is_truncated", False),
        )
        for rank in ranks
    ]


def _hull(windows: Iterable[Interval]) -> Interval:
    """From the first begin to the last end."""
    found = list(windows) or [(0.0, 0.0)]
    return min(begin for begin, _ in found), max(end for _, end in found)


def _from_begin(times: dict[Kind, list[Interval]], whole: Interval) -> dict[Kind, list[Interval]]:
    """From the begin of the picture on, and no finer than one sees."""
    zero, gap = whole[0], (whole[1] - whole[0]) * FINEST
    return {
        kind: merged(
            [(begin - zero, end - zero) for begin, end in found], 0.0 if kind in WAITS else gap
        )
        for kind, found in times.items()
    }


def _longest_wait(spans: Sequence[Span], window: Interval) -> Span | None:
    waits = [one for one in spans if kind_of(one) in WAITS_FOR_COPIES]
    inside = [one for one in waits if window[0] <= one.begin_s and one.end_s <= window[1]]
    return max(inside, key=lambda one: one.end_s - one.begin_s, default=None)


def _lines(
    timeline: Timeline, rank: int, window: Interval, zero_s: float
) -> dict[str, list[tuple[float, int]]]:
    found: dict[str, list[tuple[float, int]]] = {}
    for counter in COUNTERS:
        samples = timeline.counter(rank, counter)
        before = [one.nbytes for one in samples if one.time_s <= window[0]][-1:]
        points = [(window[0] - zero_s, nbytes) for nbytes in before]
        points += [
            (one.time_s - zero_s, one.nbytes)
            for one in samples
            if window[0] < one.time_s <= window[1]
        ]
        if points:
            found[counter] = [*points, (window[1] - zero_s, points[-1][1])]
    return found
