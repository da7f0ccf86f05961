"""Picture of a step of a trace: the work of each rank's streams, and bytes over time.

    draw(read("out.json.gz"), "out.png")
    draw(read("out.json.gz"), "out.png", ranks=[0], predicted=read("virtual.json.gz"))

Waits of compute for copies have the one strong colour, with a band down to the copies and bytes.
Needs matplotlib: the extra ``plots``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pp_offload._common import pictures as art
from pp_offload._common.pictures import FORMATS, NEEDS
from pp_offload.trace import figures as fig
from pp_offload.trace import timeline as tl
from pp_offload.trace.figures import WAITS, WAITS_FOR_COPIES, Interval, Kind, RankFigures
from pp_offload.trace.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FORMATS", "NEEDS", "draw", "picture"]

STYLES = {  # row, colour and hatch; a later kind covers those before
    Kind.OPERATORS: ("compute", art.OTHER_WORK, ""),
    Kind.FORWARD: ("compute", art.FORWARD, ""),
    Kind.BACKWARD: ("compute", art.BACKWARD, ""),
    Kind.WAITS_FOR_RELOAD: ("compute", art.WAIT, ""),
    Kind.WAITS_FOR_OFFLOAD: ("compute", art.WAIT, "////"),
    Kind.WAITS_FOR_DISK: ("compute", art.WAIT, "xxxx"),
    Kind.WAITS_FOR_RANK: ("compute", art.WHITE, "..."),
    Kind.OFFLOAD: ("d2h", art.OFFLOAD, ""),
    Kind.RELOAD: ("h2d", art.RELOAD, ""),
    Kind.WRITE: ("disk", art.DISK, ""),
    Kind.READ: ("disk", art.DISK, "////"),
}
LINES = dict(zip(tl.COUNTERS, (art.DEVICE, art.HOST, art.OFFLOAD, art.RELOAD), strict=True))
DASHED: dict[str, Any] = {"linewidth": 1.1, "linestyle": (0, (4, 2))}
MIB, GIB = 2**20, 2**30


def draw(timeline: Timeline, path: str | os.PathLike[str], **options: Any) -> None:
    """Write the picture of a step: PNG, SVG or PDF, by the name of the file.

    Args:
        timeline: A real run, or a virtual one.
        path: File to write.
        options: ``ranks``, ``step`` and ``predicted`` of :func:`picture`.

    Raises:
        ImportError: There is no matplotlib.
        ValueError: The trace has no such step or rank, or the name has another suffix.
        OSError: The file cannot be written.
    """
    art.check_format(path)
    art.save(picture(timeline, **options), path)


def picture(
    timeline: Timeline,
    *,
    ranks: Sequence[int] | None = None,
    step: int | None = None,
    predicted: Timeline | None = None,
) -> Figure:
    """Make the picture as a figure of matplotlib, for a notebook.

    Args:
        timeline: A real run, or a virtual one.
        ranks: Ranks to draw, in this order; all that have the step when None.
        step: Number of the step; the last one when None.
        predicted: Another trace. The bytes of its last step are drawn dashed over the others.

    Raises:
        ImportError: There is no matplotlib.
        ValueError: The trace has no such step or rank.
    """
    number = fig.checked_step(timeline, step)
    panels = _panels(timeline, number)
    ranks = list(panels) if ranks is None else list(ranks)
    if missing := [rank for rank in ranks if rank not in panels]:
        raise ValueError(
            f"rank {missing[0]} has no step {number} in the trace, expected some of {[*panels]}"
        )
    plan = {} if predicted is None else _panels(predicted, fig.checked_step(predicted, None))
    shown_ms = max(each[rank].end_ms for each in (panels, plan) for rank in ranks if rank in each)
    figure = art.new_figure(1.1 + 2.1 * len(ranks))
    heights = [height for _ in ranks for height in (1.15, 0.85)]
    axes = figure.subplots(2 * len(ranks), 1, sharex=True, height_ratios=heights)
    for rank, above, below in zip(ranks, axes[::2], axes[1::2], strict=True):
        _draw_times(above, panels[rank], shown_ms)
        _draw_bytes(below, panels[rank], plan.get(rank))
    axes[-1].set_xlim(0, shown_ms)
    axes[-1].set_xlabel(f"time since the begin of step {number}, ms", fontsize=9)
    _legend(figure, [panels[rank] for rank in ranks], has_plan=any(rank in plan for rank in ranks))
    figure.set_layout_engine("constrained", hspace=0.02, h_pad=0.03)
    return figure


class _Panel(NamedTuple):
    """Panel of a rank. Times are in ms from the begin of the first rank's step on."""

    figures: RankFigures
    end_ms: float
    times: dict[Kind, list[Interval]]
    lines: dict[str, list[tuple[float, int]]]
    longest: tuple[float, float, str]
    """Length and middle of the longest wait for a copy, and its name; 0 ms without waits."""


def _panels(timeline: Timeline, step: int) -> dict[int, _Panel]:
    windows = fig.steps_of(timeline)[step]
    zero_s = min(begin_s for begin_s, _ in windows.values())
    figures = fig.figures_of(timeline, step)
    return {each.rank: _panel(timeline, each, windows[each.rank], zero_s) for each in figures}


def _panel(timeline: Timeline, figures: RankFigures, window: Interval, zero_s: float) -> _Panel:
    def ms(time_s: float) -> float:
        return (time_s - zero_s) * 1e3

    spans = [span for span in timeline.spans if span.rank == figures.rank]
    finest = figures.seconds / 4000  # smaller gaps cannot be seen, but each wait counts
    times = {
        kind: [(ms(b), ms(e)) for b, e in fig.merged(each, 0 if kind in WAITS else finest)]
        for kind, each in fig.times_of(spans, window).items()
    }
    lines = {
        name: [(ms(at), n) for at, n in fig.values_of(timeline, figures.rank, name, window)]
        for name in tl.COUNTERS
    }
    waits = [
        (ms(span.end_s) - ms(span.begin_s), ms((span.begin_s + span.end_s) / 2), span.name)
        for span in spans
        if fig.kind_of(span) in WAITS_FOR_COPIES
        and window[0] <= span.begin_s
        and span.end_s <= window[1]
    ]
    return _Panel(figures, ms(window[1]), times, lines, max(waits, default=(0.0, 0.0, "")))


def _draw_times(axes: Axes, panel: _Panel, shown_ms: float) -> None:
    has_disk = panel.times[Kind.WRITE] or panel.times[Kind.READ]
    rows = ["disk", "h2d", "d2h", "compute"][0 if has_disk else 1 :]
    for kind, (row, *_) in STYLES.items():
        if widths := [(begin, end - begin) for begin, end in panel.times[kind]]:
            axes.broken_barh(widths, (rows.index(row) - 0.4, 0.8), zorder=2, **_style(kind))
    _draw_bands(axes, panel)
    took_ms, middle_ms, name = panel.longest
    if took_ms > shown_ms / 500:  # else it is too short to be seen
        y, is_late = len(rows) - 0.35, middle_ms > shown_ms / 2
        axes.plot([middle_ms], [y], marker="v", markersize=6, color=art.WAIT)
        axes.annotate(
            f"{name} {took_ms:.3g} ms, the longest of its waits",
            xy=(middle_ms, y),
            xytext=(-7 if is_late else 7, 0),
            textcoords="offset points",
            ha="right" if is_late else "left",
            va="center",
            fontsize=8.5,
            color=art.WAIT,
        ).set_in_layout(False)  # or a long name would make the picture narrow
    axes.set_yticks(range(len(rows)), rows, fontsize=9)
    axes.set_ylim(-0.5, len(rows) - (0.1 if took_ms else 0.5))
    axes.tick_params(axis="both", length=0)
    axes.tick_params(axis="x", labelbottom=False)
    axes.spines[:].set_visible(False)
    figures, others_s = panel.figures, panel.figures.waited_s[Kind.WAITS_FOR_RANK]
    waited_s = figures.waited_for_copies_s
    title = f"rank {figures.rank}: {figures.seconds * 1e3:.1f} ms, waited for copies "
    title += f"{waited_s * 1e3:.1f} ms ({waited_s / figures.seconds:.1%})"
    title += f", for other ranks {others_s * 1e3:.1f} ms" if others_s else ""
    axes.set_title(title, fontsize=9.5, loc="left")


def _style(kind: Kind) -> dict[str, Any]:
    _, colour, hatch = STYLES[kind]
    edge = art.GREY if kind in (Kind.WAITS_FOR_RANK, Kind.READ) else art.WHITE
    return dict(facecolor=colour, hatch=hatch, edgecolor=edge, linewidth=0.0)


def _draw_bands(axes: Axes, panel: _Panel) -> None:
    for begin, end in (time for kind in WAITS_FOR_COPIES for time in panel.times[kind]):
        axes.axvspan(begin, end, color=art.WAIT, alpha=0.13, linewidth=0, zorder=0)


def _draw_bytes(axes: Axes, panel: _Panel, predicted: _Panel | None) -> None:
    most = max((nbytes for line in panel.lines.values() for _, nbytes in line), default=0)
    unit, name = (GIB, "GiB") if most >= GIB // 2 else (MIB, "MiB")
    _draw_bands(axes, panel)
    for each, style in ((panel, {"linewidth": 1.3}), (predicted, DASHED)):
        for counter, line in each.lines.items() if each is not None else ():
            times, values = [ms for ms, _ in line], [nbytes / unit for _, nbytes in line]
            if line:
                axes.step(times, values, where="post", color=LINES[counter], **style)
            if each is panel and counter in (tl.IN_FLIGHT, tl.RELOADED):
                fill: dict[str, Any] = dict(color=LINES[counter], alpha=0.2, lw=0)
                axes.fill_between(times, values, step="post", **fill)
    if predicted is not None:
        axes.axvline(predicted.end_ms, color=art.DEVICE, **DASHED)
    axes.set_ylabel(f"memory, {name}", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.1)
    axes.tick_params(axis="both", labelsize=8)
    axes.grid(axis="y", color=art.FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, panels: Sequence[_Panel], *, has_plan: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = [kind for kind in Kind if any(panel.times[kind] for panel in panels)]
    counters = [name for name in tl.COUNTERS if any(panel.lines[name] for panel in panels)]
    handles: list[Any] = [Patch(label=kind.value, **_style(kind)) for kind in kinds]
    handles += [Line2D([], [], color=LINES[name], label=f"memory: {name}") for name in counters]
    if has_plan:
        handles.append(Line2D([], [], color=art.DEVICE, label="predicted", **DASHED))
    figure.legend(handles=handles, loc="outside upper left", ncols=4, fontsize=8.5, frameon=False)
