"""A step of a trace as a picture: what each rank's streams did, and the bytes over time.

    draw(read("out.json.gz"), "out.png")
    draw(read("out.json.gz"), "out.png", ranks=[0], predicted=read("virtual.json.gz"))

A wait of compute for a copy has the one strong colour, and a band of it goes down to the copies and
the bytes, so that one sees what was copied meanwhile. It takes matplotlib: the extra ``plots``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pp_offload._common.pictures import (
    BLACK,
    BLUE,
    FAINT,
    FORMATS,
    GREEN,
    GREY,
    NEEDS,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    WHITE,
    YELLOW,
    check_format,
    new_figure,
    save,
)
from pp_offload.trace.events import COUNTERS, DEVICE, HOST, IN_FLIGHT, RELOADED, Timeline
from pp_offload.trace.figures import checked_step, steps_of
from pp_offload.trace.intervals import Interval
from pp_offload.trace.kinds import WAITS, WAITS_FOR_COPIES, Kind, kind_of
from pp_offload.trace.panels import Panel, panels_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FORMATS", "NEEDS", "draw", "picture"]

MIB, GIB = 2**20, 2**30

SEEN = 1 / 500
"""Of the width: a shorter wait is not pointed at."""

DASHES = (0, (4, 2))

FILL = {
    Kind.FORWARD: SKY,
    Kind.BACKWARD: BLUE,
    Kind.OPERATORS: GREY,
    Kind.OFFLOAD: GREEN,
    Kind.RELOAD: PURPLE,
    Kind.WRITE: ORANGE,
    Kind.READ: YELLOW,
    Kind.WAITS_FOR_RELOAD: VERMILION,
    Kind.WAITS_FOR_OFFLOAD: VERMILION,
    Kind.WAITS_FOR_DISK: VERMILION,
    Kind.WAITS_FOR_RANK: WHITE,
}
HATCH = {
    Kind.WAITS_FOR_RELOAD: "",
    Kind.WAITS_FOR_OFFLOAD: "////",
    Kind.WAITS_FOR_DISK: "xxxx",
    Kind.WAITS_FOR_RANK: "...",
}
ROWS = {
    "compute": (Kind.FORWARD, Kind.BACKWARD, Kind.OPERATORS, *WAITS),
    "d2h": (Kind.OFFLOAD,),
    "h2d": (Kind.RELOAD,),
    "disk": (Kind.WRITE, Kind.READ),
}
LINES = {DEVICE: BLACK, HOST: ORANGE, IN_FLIGHT: GREEN, RELOADED: PURPLE}


def draw(
    timeline: Timeline,
    path: str | os.PathLike[str],
    *,
    ranks: Sequence[int] | None = None,
    step: int | None = None,
    predicted: Timeline | None = None,
) -> None:
    """Write the picture of one step.

    Args:
        timeline: Of a real run, or of a virtual one.
        path: Of the file; PNG, SVG or PDF, as its name ends.
        ranks: Which ones, in this order; all that have the step when None.
        step: Its number; the last one of the trace when None.
        predicted: Another trace, whose bytes are drawn dashed over the others, from the begin of
            its own last step on. Ranks that it has not are drawn without.

    Raises:
        ImportError: There is no matplotlib.
        ValueError: The trace has no such step or rank, or the file's name ends otherwise.
        OSError: The file cannot be written.
    """
    check_format(path)
    save(picture(timeline, ranks=ranks, step=step, predicted=predicted), path)


def picture(
    timeline: Timeline,
    *,
    ranks: Sequence[int] | None = None,
    step: int | None = None,
    predicted: Timeline | None = None,
) -> Figure:
    """The same as a figure of matplotlib, which a notebook shows.

    Args:
        timeline, ranks, step, predicted: As for :func:`draw`.

    Raises:
        ImportError: There is no matplotlib.
        ValueError: The trace has no such step or rank.
    """
    number = checked_step(timeline, step)
    by_rank = steps_of(timeline)[number]
    chosen = list(by_rank) if ranks is None else list(ranks)
    missing = [rank for rank in chosen if rank not in by_rank]
    if missing:
        raise ValueError(
            f"rank {missing[0]} has no step {number} in the trace, expected some of {[*by_rank]}"
        )
    panels = panels_of(timeline, number, chosen, predicted)
    figure = new_figure(1.1 + 2.1 * len(panels))
    _draw(figure, panels, number)
    return figure


def _draw(figure: Figure, panels: Sequence[Panel], step: int) -> None:
    heights = [height for _ in panels for height in (1.15, 0.85)]
    axes = figure.subplots(2 * len(panels), 1, sharex=True, height_ratios=heights, squeeze=False)
    rows = [row[0] for row in axes]
    for panel, above, below in zip(panels, rows[::2], rows[1::2], strict=True):
        _draw_times(above, panel)
        _draw_bytes(below, panel)
    rows[-1].set_xlim(0, panels[0].shown_s * 1e3)
    rows[-1].set_xlabel(f"time since the begin of step {step}, ms", fontsize=9)
    _legend(figure, panels)
    figure.set_layout_engine("constrained", hspace=0.02, h_pad=0.03)


def _draw_times(axes: Axes, panel: Panel) -> None:
    names = _rows(panel)
    for row, name in enumerate(names):
        for kind in ROWS[name]:
            _bars(axes, panel.times[kind], row, kind)
    _bands(axes, panel)
    _say_why(axes, panel)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(-0.5, len(names) - (0.5 if panel.longest is None else -0.1))
    axes.tick_params(axis="both", length=0)
    axes.tick_params(axis="x", labelbottom=False)
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(_title(panel), fontsize=9.5, loc="left")


def _rows(panel: Panel) -> list[str]:
    """From the bottom. That of the disk is there if it did anything."""
    has_disk = any(panel.times[kind] for kind in ROWS["disk"])
    return [name for name in reversed(ROWS) if has_disk or name != "disk"]


def _bars(axes: Axes, times: Sequence[Interval], row: int, kind: Kind) -> None:
    widths = [(begin * 1e3, (end - begin) * 1e3) for begin, end in times]
    axes.broken_barh(
        widths,
        (row - 0.4, 0.8),
        facecolor=FILL[kind],
        hatch=HATCH.get(kind),
        edgecolor=GREY if FILL[kind] == WHITE else WHITE,
        linewidth=0.0,
        zorder=2,
    )


def _say_why(axes: Axes, panel: Panel) -> None:
    """What the longest wait is for, above it; unless it is too short to be seen."""
    one = panel.longest
    if one is None or one.end_s - one.begin_s < SEEN * panel.shown_s:
        return
    middle_s = (one.begin_s + one.end_s) / 2 - panel.begin_s
    is_right = middle_s > panel.shown_s / 2
    kind = kind_of(one)
    name = kind.value if kind is Kind.WAITS_FOR_DISK else one.name  # that one's is long
    above = len(_rows(panel)) - 0.35
    axes.plot([middle_s * 1e3], [above], marker="v", markersize=6, color=VERMILION)
    said = axes.annotate(
        f"{name} {(one.end_s - one.begin_s) * 1e3:.3g} ms, the longest of its waits",
        xy=(middle_s * 1e3, above),
        xytext=(-7 if is_right else 7, 0),
        textcoords="offset points",
        ha="right" if is_right else "left",
        va="center",
        fontsize=8.5,
        color=VERMILION,
    )
    said.set_in_layout(False)  # or a long name would make the picture narrow


def _bands(axes: Axes, panel: Panel) -> None:
    """Where compute waits for copies, from the top to the bottom."""
    for kind in WAITS_FOR_COPIES:
        for begin, end in panel.times[kind]:
            axes.axvspan(begin * 1e3, end * 1e3, color=VERMILION, alpha=0.13, linewidth=0, zorder=0)


def _draw_bytes(axes: Axes, panel: Panel) -> None:
    unit, name = _unit(panel)
    _bands(axes, panel)
    for counter, points in panel.lines.items():
        times, values = [time * 1e3 for time, _ in points], [n / unit for _, n in points]
        axes.step(times, values, where="post", color=LINES[counter], linewidth=1.3)
        if counter in (IN_FLIGHT, RELOADED):
            axes.fill_between(times, values, step="post", color=LINES[counter], alpha=0.2, lw=0)
    for counter, points in panel.predicted.items():
        times, values = [time * 1e3 for time, _ in points], [n / unit for _, n in points]
        axes.step(
            times, values, where="post", color=LINES[counter], linewidth=1.1, linestyle=DASHES
        )
    if panel.predicted_s is not None:
        axes.axvline(panel.predicted_s * 1e3, color=BLACK, linewidth=1.1, linestyle=DASHES)
    axes.set_ylabel(f"memory, {name}", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.1)
    axes.tick_params(axis="both", labelsize=8)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _unit(panel: Panel) -> tuple[int, str]:
    every = [*panel.lines.values(), *panel.predicted.values()]
    most = max((nbytes for points in every for _, nbytes in points), default=0)
    return (GIB, "GiB") if most >= GIB // 2 else (MIB, "MiB")


def _title(panel: Panel) -> str:
    figures = panel.figures
    waited_s = sum(figures.waited_s[kind] for kind in WAITS_FOR_COPIES)
    said = f"rank {figures.rank}: {figures.seconds * 1e3:.1f} ms, waited for copies "
    said += f"{waited_s * 1e3:.1f} ms ({waited_s / figures.seconds:.1%})"
    others_s = figures.waited_s[Kind.WAITS_FOR_RANK]
    if others_s:
        said += f", for other ranks {others_s * 1e3:.1f} ms"
    return said if panel.is_whole else f"{said}; the recording stopped early"


def _legend(figure: Figure, panels: Sequence[Panel]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = [kind for kind in Kind if any(panel.times[kind] for panel in panels)]
    handles: list[Any] = [
        Patch(
            facecolor=FILL[kind],
            hatch=HATCH.get(kind),
            edgecolor=GREY if FILL[kind] == WHITE else WHITE,
            linewidth=0.0,
            label=kind.value,
        )
        for kind in shown
    ]
    counters = [name for name in COUNTERS if any(name in panel.lines for panel in panels)]
    handles += [Line2D([], [], color=LINES[name], label=f"memory: {name}") for name in counters]
    if any(panel.predicted for panel in panels):
        handles.append(Line2D([], [], color=BLACK, linestyle=DASHES, label="predicted"))
    figure.legend(handles=handles, loc="outside upper left", ncols=4, fontsize=8.5, frameon=False)
