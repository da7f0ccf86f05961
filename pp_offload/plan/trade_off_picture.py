"""Limits of memory against the time of a step, as a picture.

    draw_front(found, "front.png", title="Llama 8B on 4 H100")

It takes matplotlib: the extra ``plots``.
"""

from __future__ import annotations

import os

from pp_offload._common.pictures import (
    BLACK,
    BLUE,
    FAINT,
    ORANGE,
    VERMILION,
    check_format,
    new_figure,
    save,
)
from pp_offload.plan.trade_off import GIB, Front, peak_of

HEIGHT_INCHES = 4.0


def draw_front(found: Front, path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw it.

    Args:
        found: What :func:`front` gave.
        path: A file, whose end says the format.
        title: Model, schedule and device, in words.

    Raises:
        ImportError: Matplotlib is not installed.
        OSError: The file cannot be written.
        ValueError: Its name ends otherwise than pictures do.
    """
    check_format(path)
    none = found.without_offload
    figure = new_figure(HEIGHT_INCHES, layout="constrained")
    axes = figure.add_subplot()
    limits = [plan.limit_bytes / GIB for plan in found.plans]
    times_ms = [plan.seconds * 1e3 for plan in found.plans]
    axes.plot(limits, times_ms, color=BLUE, marker="o", markersize=4, label="by a plan")
    partly = [plan for plan in found.plans if any(any(rank.recomputed) for rank in plan.ranks)]
    axes.plot(
        [plan.limit_bytes / GIB for plan in partly],
        [plan.seconds * 1e3 for plan in partly],
        color=VERMILION,
        marker="o",
        linestyle="",
        markersize=8,
        markerfacecolor="none",
        label="with layers recomputed",
    )
    others = [("without offload", none, BLACK, "s")]
    if found.recomputed is not None:
        others.append(("all layers recomputed, nothing leaves", found.recomputed, ORANGE, "D"))
    for name, step, colour, marker in others:
        axes.plot(
            [peak_of(step) / GIB],
            [step.seconds * 1e3],
            color=colour,
            marker=marker,
            linestyle="",
            label=name,
        )
    axes.axhline(none.seconds * 1e3, color=BLACK, linewidth=0.6, linestyle="--")
    axes.axvspan(0, limits[0], color=FAINT, label="no plan was found")
    axes.set_xlim(left=0)
    axes.set_xlabel("limit of each device, GiB")
    axes.set_ylabel("step, ms")
    axes.grid(color=FAINT, linewidth=0.6)
    axes.legend(fontsize=8)
    axes.set_title(title, fontsize=9, loc="left", wrap=True)
    save(figure, path)
