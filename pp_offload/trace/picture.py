"""Picture of a step of a trace: the work of each rank's streams, and bytes over time.

Waits of compute for copies have the one strong colour, with a band down to the copies and bytes.
Needs matplotlib: the extra ``plots``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pp_offload._common import pictures as art
from pp_offload._common.text import GIB, MIB
from pp_offload.trace import timeline as tl
from pp_offload.trace.figures import WAITS, WAITS_FOR_COPIES, Kind, RankStep, merged, rank_steps
from pp_offload.trace.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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

Milliseconds = Callable[[float], float]  # of seconds, since the first rank began the step


def draw(timeline: Timeline, path: str | os.PathLike[str], **options: Any) -> None:
    """Write the picture of a step: PNG, SVG or PDF, by the name of the file.

    ``options`` are those of :func:`picture`.

    Raises:
        ImportError: There is no matplotlib.
        ValueError: The trace has no such step, or the name has another suffix.
        KeyError: A rank has no such step.
        OSError: The file cannot be written.
    """
    art.check_format(path)
    art.save(picture(timeline, **options), path)


def picture(
    timeline: Timeline, *, ranks: Sequence[int] | None = None, step: int | None = None
) -> Figure:
    """Make the picture as a figure of matplotlib, for a notebook.

    Args:
        timeline: A real run, or a virtual one.
        ranks: Ranks to draw, in this order; all that have the step when None.
        step: Number of the step; the last one when None.

    Raises: see :func:`draw`.
    """
    steps = rank_steps(timeline, step)
    zero_s = min(each.begin_s for each in steps.values())
    shown = [steps[rank] for rank in ranks or steps]

    def ms(time_s: float) -> float:
        return (time_s - zero_s) * 1e3

    shown_ms = max(ms(each.end_s) for each in shown)
    figure = art.new_figure(1.1 + 2.1 * len(shown))
    heights = [1.15, 0.85] * len(shown)
    axes = figure.subplots(len(heights), sharex=True, height_ratios=heights)
    for each, above, below in zip(shown, axes[::2], axes[1::2], strict=True):
        _draw_times(above, each, ms, shown_ms)
        _draw_bytes(below, each, ms)
    axes[-1].set_xlim(0, shown_ms)
    axes[-1].set_xlabel(f"time since the begin of step {shown[0].facts['step']}, ms", fontsize=9)
    _legend(figure, shown)
    figure.set_layout_engine("constrained", hspace=0.02, h_pad=0.03)
    return figure


def _draw_times(axes: Axes, step: RankStep, ms: Milliseconds, shown_ms: float) -> None:
    has_disk = step.times[Kind.WRITE] or step.times[Kind.READ]
    rows = ["disk", "h2d", "d2h", "compute"][0 if has_disk else 1 :]
    finest_s = shown_ms / 4e6  # smaller gaps cannot be seen, but each wait counts
    for kind, (row, *_) in STYLES.items():
        times = merged(step.times[kind], 0 if kind in WAITS else finest_s)
        if widths := [(ms(begin), (end - begin) * 1e3) for begin, end in times]:
            axes.broken_barh(widths, (rows.index(row) - 0.4, 0.8), zorder=2, **_style(kind))
    _draw_bands(axes, step, ms)
    waits = [
        ((span.end_s - span.begin_s) * 1e3, ms((span.begin_s + span.end_s) / 2), span.name)
        for kind in WAITS_FOR_COPIES
        for span in step.spans[kind]
        if span.end_s <= step.end_s
    ]
    took_ms, middle_ms, name = max(waits, default=(0.0, 0.0, ""))
    if took_ms > shown_ms / 500:  # else it is too short to be seen
        at = middle_ms, len(rows) - 0.35
        axes.plot(*at, marker="v", markersize=6, color=art.WAIT)
        text = f"{name} {took_ms:.3g} ms, the longest of its waits"
        aside, flush = (-7, "right") if middle_ms > shown_ms / 2 else (7, "left")
        place: dict[str, Any] = dict(xytext=(aside, 0), textcoords="offset points", ha=flush)
        note = axes.annotate(text, at, va="center", fontsize=8.5, color=art.WAIT, **place)
        note.set_in_layout(False)  # or a long name would make the picture narrow
    axes.set_yticks(range(len(rows)), rows, fontsize=9)
    axes.set_ylim(-0.5, len(rows) - (0.1 if waits else 0.5))
    axes.tick_params(axis="both", length=0)
    axes.tick_params(axis="x", labelbottom=False)
    axes.spines[:].set_visible(False)
    seconds, others_s = step.end_s - step.begin_s, step.seconds_of(Kind.WAITS_FOR_RANK)
    waited_s = step.seconds_of(*WAITS_FOR_COPIES)
    title = f"rank {step.rank}: {seconds * 1e3:.1f} ms, waited for copies {waited_s * 1e3:.1f} ms"
    title += f" ({waited_s / seconds:.1%})"
    title += f", for other ranks {others_s * 1e3:.1f} ms" if others_s else ""
    axes.set_title(title, fontsize=9.5, loc="left")


def _style(kind: Kind) -> dict[str, Any]:
    _, colour, hatch = STYLES[kind]
    edge = art.GREY if kind in (Kind.WAITS_FOR_RANK, Kind.READ) else art.WHITE
    return dict(facecolor=colour, hatch=hatch, edgecolor=edge, linewidth=0.0)


def _draw_bands(axes: Axes, step: RankStep, ms: Milliseconds) -> None:
    for begin, end in (time for kind in WAITS_FOR_COPIES for time in step.times[kind]):
        axes.axvspan(ms(begin), ms(end), color=art.WAIT, alpha=0.13, linewidth=0, zorder=0)


def _draw_bytes(axes: Axes, step: RankStep, ms: Milliseconds) -> None:
    most = max(step.peak_bytes.values(), default=0)
    unit, name = (GIB, "GiB") if most >= GIB // 2 else (MIB, "MiB")
    _draw_bands(axes, step, ms)
    for counter, line in step.values.items():
        times = [ms(time_s) for time_s, _ in line]
        values = [nbytes / unit for _, nbytes in line]
        if line:
            axes.step(times, values, where="post", color=LINES[counter], linewidth=1.3)
        if counter in (tl.IN_FLIGHT, tl.RELOADED):
            axes.fill_between(times, values, step="post", color=LINES[counter], alpha=0.2, lw=0)
    axes.set_ylabel(f"memory, {name}", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.1)
    axes.tick_params(axis="both", labelsize=8)
    axes.grid(axis="y", color=art.FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, steps: Sequence[RankStep]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = [kind for kind in Kind if any(step.times[kind] for step in steps)]
    counters = [name for name in tl.COUNTERS if any(step.values[name] for step in steps)]
    handles: list[Any] = [Patch(label=kind.value, **_style(kind)) for kind in kinds]
    handles += [Line2D([], [], color=LINES[name], label=f"memory: {name}") for name in counters]
    figure.legend(handles=handles, loc="outside upper left", ncols=4, fontsize=8.5, frameon=False)
