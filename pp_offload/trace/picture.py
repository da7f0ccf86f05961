"""Picture of a step of a trace: what the streams of each rank did, and bytes over time.

    draw(read("out.json.gz"), "out.png")
    draw(read("out.json.gz"), "out.png", ranks=[0], predicted=read("virtual.json.gz"))

A wait of compute for a copy has the one strong colour, and a band of it goes down to the copies and
the bytes. Needs matplotlib: the extra ``plots``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pp_offload._common import pictures as art
from pp_offload._common.pictures import FORMATS, NEEDS
from pp_offload.trace.figures import (
    WAITS,
    WAITS_FOR_COPIES,
    Interval,
    Kind,
    RankFigures,
    checked_step,
    common,
    figures_of,
    kind_of,
    merged,
    steps_of,
    values_of,
)
from pp_offload.trace.timeline import COUNTERS, DEVICE, HOST, IN_FLIGHT, RELOADED, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FORMATS", "NEEDS", "draw", "picture"]

ROWS = {
    "compute": (Kind.OPERATORS, Kind.FORWARD, Kind.BACKWARD, *WAITS),  # later ones cover earlier
    "d2h": (Kind.OFFLOAD,),
    "h2d": (Kind.RELOAD,),
    "disk": (Kind.WRITE, Kind.READ),
}
FILL = dict.fromkeys(WAITS, art.VERMILION) | {
    Kind.OPERATORS: art.GREY,
    Kind.FORWARD: art.SKY,
    Kind.BACKWARD: art.BLUE,
    Kind.OFFLOAD: art.GREEN,
    Kind.RELOAD: art.PURPLE,
    Kind.WRITE: art.ORANGE,
    Kind.READ: art.YELLOW,
    Kind.WAITS_FOR_RANK: art.WHITE,
}
HATCH = {
    Kind.WAITS_FOR_OFFLOAD: "////",
    Kind.WAITS_FOR_DISK: "xxxx",
    Kind.WAITS_FOR_RANK: "...",
}
LINES = {DEVICE: art.BLACK, HOST: art.ORANGE, IN_FLIGHT: art.GREEN, RELOADED: art.PURPLE}
DASHES = (0, (4, 2))
MIB, GIB = 2**20, 2**30


def draw(
    timeline: Timeline,
    path: str | os.PathLike[str],
    *,
    ranks: Sequence[int] | None = None,
    step: int | None = None,
    predicted: Timeline | None = None,
) -> None:
    """Write the picture of a step: PNG, SVG or PDF, by the name of the file.

    Args:
        timeline, ranks, step, predicted: As for :func:`picture`.
        path: File to write.

    Raises:
        ImportError: There is no matplotlib.
        ValueError: The trace has no such step or rank, or the name ends otherwise.
        OSError: The file cannot be written.
    """
    art.check_format(path)
    art.save(picture(timeline, ranks=ranks, step=step, predicted=predicted), path)


def picture(
    timeline: Timeline,
    *,
    ranks: Sequence[int] | None = None,
    step: int | None = None,
    predicted: Timeline | None = None,
) -> Figure:
    """The picture as a figure of matplotlib, for a notebook.

    Args:
        timeline: A real run, or a virtual one.
        ranks: Ranks to draw, in this order; all that have the step when None.
        step: Number of the step; the last one when None.
        predicted: Another trace. The bytes of its last step are drawn dashed over the others.

    Raises:
        ImportError: There is no matplotlib.
        ValueError: The trace has no such step or rank.
    """
    number = checked_step(timeline, step)
    windows = steps_of(timeline)[number]
    ranks = list(windows) if ranks is None else list(ranks)
    if missing := [rank for rank in ranks if rank not in windows]:
        raise ValueError(
            f"rank {missing[0]} has no step {number} in the trace, expected some of {[*windows]}"
        )
    figures = {each.rank: each for each in figures_of(timeline, number)}
    panels = _panels(timeline, number, ranks)
    foretold = [] if predicted is None else _panels(predicted, checked_step(predicted, None), ranks)
    figure = art.new_figure(1.1 + 2.1 * len(ranks))
    heights = [height for _ in ranks for height in (1.15, 0.85)]
    axes = figure.subplots(2 * len(ranks), 1, sharex=True, height_ratios=heights)
    shown_s = max(panel.window[1] - panel.zero_s for panel in (*panels, *foretold))
    for above, below, panel in zip(axes[::2], axes[1::2], panels, strict=True):
        _draw_times(above, panel, figures[panel.rank], shown_s)
        _draw_bytes(below, panel, next((p for p in foretold if p.rank == panel.rank), None))
    axes[-1].set_xlim(0, shown_s * 1e3)
    axes[-1].set_xlabel(f"time since the begin of step {number}, ms", fontsize=9)
    _legend(figure, panels, is_predicted=bool(foretold))
    figure.set_layout_engine("constrained", hspace=0.02, h_pad=0.03)
    return figure


@dataclass(frozen=True)
class _Panel:
    """One rank in a window. Times are drawn from ``zero_s`` on, which all ranks share."""

    rank: int
    window: Interval
    zero_s: float
    spans: list[Span]
    lines: dict[str, list[tuple[float, int]]]
    is_whole: bool

    def times(self, kind: Kind) -> list[Interval]:
        """Times of a kind in ms. Compute of groups is that of operators, where those are known."""
        times = [(span.begin_s, span.end_s) for span in self.spans if kind_of(span) is kind]
        worked = [(s.begin_s, s.end_s) for s in self.spans if kind_of(s) is Kind.OPERATORS]
        if worked and kind in (Kind.FORWARD, Kind.BACKWARD):
            times = common(times, worked)
        finest = 0.0 if kind in WAITS else (self.window[1] - self.window[0]) / 4000
        times = merged(common(times, [self.window]), finest)
        return [((begin - self.zero_s) * 1e3, (end - self.zero_s) * 1e3) for begin, end in times]


def _panels(timeline: Timeline, step: int, ranks: Sequence[int]) -> list[_Panel]:
    windows = steps_of(timeline)[step]
    ranks = [rank for rank in ranks if rank in windows]
    zero_s = min((windows[rank][0] for rank in ranks), default=0.0)
    return [
        _Panel(
            rank,
            windows[rank],
            zero_s,
            [span for span in timeline.spans if span.rank == rank],
            {name: values_of(timeline, rank, name, windows[rank]) for name in COUNTERS},
            not timeline.metadata.get(rank, {}).get("is_truncated", False),
        )
        for rank in ranks
    ]


def _draw_times(axes: Axes, panel: _Panel, figures: RankFigures, shown_s: float) -> None:
    has_disk = any(panel.times(kind) for kind in ROWS["disk"])
    names = [name for name in reversed(ROWS) if has_disk or name != "disk"]
    for row, name in enumerate(names):
        for kind in ROWS[name]:
            widths = [(begin, end - begin) for begin, end in panel.times(kind)]
            axes.broken_barh(widths, (row - 0.4, 0.8), zorder=2, **_style(kind))
    _bands(axes, panel)
    is_marked = _mark_longest_wait(axes, panel, shown_s, len(names) - 0.35)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(-0.5, len(names) + (0.1 if is_marked else -0.5))
    axes.tick_params(axis="both", length=0)
    axes.tick_params(axis="x", labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.set_title(_title(panel, figures), fontsize=9.5, loc="left")


def _style(kind: Kind) -> dict[str, Any]:
    edge = art.GREY if FILL[kind] == art.WHITE else art.WHITE
    return {
        "facecolor": FILL[kind],
        "hatch": HATCH.get(kind),
        "edgecolor": edge,
        "linewidth": 0.0,
    }


def _bands(axes: Axes, panel: _Panel) -> None:
    for begin, end in (time for kind in WAITS_FOR_COPIES for time in panel.times(kind)):
        axes.axvspan(begin, end, color=art.VERMILION, alpha=0.13, linewidth=0, zorder=0)


def _mark_longest_wait(axes: Axes, panel: _Panel, shown_s: float, above: float) -> bool:
    """Say what the longest wait for a copy is for, unless it is too short to be seen."""
    begin_s, end_s = panel.window
    waits = [span for span in panel.spans if kind_of(span) in WAITS_FOR_COPIES]
    waits = [span for span in waits if begin_s <= span.begin_s and span.end_s <= end_s]
    longest = max(waits, key=lambda span: span.end_s - span.begin_s, default=None)
    if longest is None or longest.end_s - longest.begin_s < shown_s / 500:
        return False
    middle_s = (longest.begin_s + longest.end_s) / 2 - panel.zero_s
    is_right, kind = middle_s > shown_s / 2, kind_of(longest)
    name = kind.value if kind is Kind.WAITS_FOR_DISK else longest.name  # a long name
    axes.plot([middle_s * 1e3], [above], marker="v", markersize=6, color=art.VERMILION)
    text = axes.annotate(
        f"{name} {(longest.end_s - longest.begin_s) * 1e3:.3g} ms, the longest of its waits",
        xy=(middle_s * 1e3, above),
        xytext=(-7 if is_right else 7, 0),
        textcoords="offset points",
        ha="right" if is_right else "left",
        va="center",
        fontsize=8.5,
        color=art.VERMILION,
    )
    text.set_in_layout(False)  # or a long name would make the picture narrow
    return True


def _title(panel: _Panel, figures: RankFigures) -> str:
    waited_s, others_s = figures.waited_for_copies_s, figures.waited_s[Kind.WAITS_FOR_RANK]
    text = f"rank {panel.rank}: {figures.seconds * 1e3:.1f} ms, waited for copies "
    text += f"{waited_s * 1e3:.1f} ms ({waited_s / figures.seconds:.1%})"
    text += f", for other ranks {others_s * 1e3:.1f} ms" if others_s else ""
    return text if panel.is_whole else f"{text}; the recording stopped early"


def _draw_bytes(axes: Axes, panel: _Panel, predicted: _Panel | None) -> None:
    most = max((n for points in panel.lines.values() for _, n in points), default=0)
    unit, name = (GIB, "GiB") if most >= GIB // 2 else (MIB, "MiB")
    _bands(axes, panel)
    _draw_lines(axes, panel, unit, linewidth=1.3)
    if predicted is not None:
        _draw_lines(axes, predicted, unit, linewidth=1.1, linestyle=DASHES)
        end_ms = (predicted.window[1] - predicted.zero_s) * 1e3
        axes.axvline(end_ms, color=art.BLACK, linewidth=1.1, linestyle=DASHES)
    axes.set_ylabel(f"memory, {name}", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.1)
    axes.tick_params(axis="both", labelsize=8)
    axes.grid(axis="y", color=art.FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_lines(axes: Axes, panel: _Panel, unit: int, **style: Any) -> None:
    for counter, points in panel.lines.items():
        points = [*points, *((panel.window[1], nbytes) for _, nbytes in points[-1:])]
        times = [(time_s - panel.zero_s) * 1e3 for time_s, _ in points]
        values, colour = [nbytes / unit for _, nbytes in points], LINES[counter]
        if points:
            axes.step(times, values, where="post", color=colour, **style)
        if counter in (IN_FLIGHT, RELOADED) and "linestyle" not in style:
            axes.fill_between(times, values, step="post", color=colour, alpha=0.2, lw=0)


def _legend(figure: Figure, panels: Sequence[_Panel], *, is_predicted: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = [kind for kind in Kind if any(panel.times(kind) for panel in panels)]
    counters = [name for name in COUNTERS if any(panel.lines[name] for panel in panels)]
    handles: list[Any] = [Patch(label=kind.value, **_style(kind)) for kind in kinds]
    handles += [Line2D([], [], color=LINES[name], label=f"memory: {name}") for name in counters]
    if is_predicted:
        handles.append(Line2D([], [], color=art.BLACK, linestyle=DASHES, label="predicted"))
    figure.legend(handles=handles, loc="outside upper left", ncols=4, fontsize=8.5, frameon=False)
