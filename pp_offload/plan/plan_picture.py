"""Pictures of a plan: peaks and groups of each rank; and of plans: time against limits.

    draw_plan(plan, predict(order, tapes, hardware, num_steps=1), "plan.png")
    draw_front(front(chooser), "front.png", title="Llama 8B on 4 H100")

It takes matplotlib: the extra ``plots``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pp_offload._common.offload_plan import OffloadPlan, RankPlan
from pp_offload._common.pictures import (
    BLACK,
    BLUE,
    FAINT,
    GREY,
    ORANGE,
    VERMILION,
    check_format,
    new_figure,
    save,
)
from pp_offload.plan.trade_off import GIB, Front, peak_of
from pp_offload.simulate.rank import PipelineStep

HEIGHT_INCHES = 5.0
FRONT_HEIGHT_INCHES = 4.0
BAR_WIDTH = 0.38


def draw_plan(plan: OffloadPlan, none: PipelineStep, path: str | os.PathLike[str]) -> None:
    """Draw the peaks and groups of each rank of a plan.

    Args:
        plan: Plan of :func:`choose`.
        none: Step without offload.
        path: File, whose suffix names the format.

    Raises:
        ImportError: Matplotlib is not installed.
        OSError: The file cannot be written.
        ValueError: Its name ends otherwise than pictures do.
    """
    check_format(path)
    figure = new_figure(HEIGHT_INCHES, layout="constrained")
    peaks, groups = figure.subplots(2, 1, sharex=True)
    _draw_peaks(peaks, plan, none)
    _draw_groups(groups, plan.ranks)
    for axes in (peaks, groups):
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(fontsize=8, loc="upper right")
    groups.set_xticks(range(len(plan.ranks)))
    groups.set_xlabel("pipeline rank")
    peaks.set_title(_title(plan), fontsize=9, loc="left", wrap=True)
    save(figure, path)


def _title(plan: OffloadPlan) -> str:
    slower = plan.seconds / plan.least_seconds - 1 if plan.least_seconds else 0.0
    times = f"{plan.seconds * 1e3:.1f} ms a step, {slower:.1%} more than without offload"
    return f"{plan.made_for}\n{times}" if plan.made_for else times


def _draw_peaks(axes: Any, plan: OffloadPlan, none: PipelineStep) -> None:
    ranks = range(len(plan.ranks))
    left_edges = [rank - BAR_WIDTH / 2 for rank in ranks]
    right_edges = [rank + BAR_WIDTH / 2 for rank in ranks]
    without = [rank.peak_bytes / GIB for rank in none.ranks]
    planned = [rank.peak_bytes / GIB for rank in plan.ranks]
    host = [rank.host_peak_bytes / GIB for rank in plan.ranks]
    axes.bar(left_edges, without, BAR_WIDTH, color=GREY, label="device, without offload")
    axes.bar(right_edges, planned, BAR_WIDTH, color=BLUE, label="device, by the plan")
    axes.plot(ranks, host, color=ORANGE, marker="o", linestyle="", label="host memory")
    axes.axhline(plan.limit_bytes / GIB, color=BLACK, linestyle="--", linewidth=0.8, label="limit")
    axes.set_ylim(top=1.25 * max(*without, *planned, *host, plan.limit_bytes / GIB))  # the legend's
    axes.set_ylabel("peak, GiB")


def _draw_groups(axes: Any, ranks: Sequence[RankPlan]) -> None:
    """Draw the bytes of groups that leave and that stay, by rank."""
    bottom = [0.0] * len(ranks)
    for name, colour, keeps in (("leave", BLUE, False), ("stay", GREY, True)):
        heights = [_planned_bytes(rank, keeps=keeps) / GIB for rank in ranks]
        axes.bar(range(len(ranks)), heights, color=colour, bottom=bottom, label=name)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    for number, (top, rank) in enumerate(zip(bottom, ranks, strict=True)):
        num = sum(map(len, rank.recomputed))
        if num:
            axes.annotate(
                f"{num} recomputed",
                (number, top),
                ha="center",
                va="bottom",
                fontsize=8,
                color=VERMILION,
            )
    axes.set_ylim(top=1.25 * max(bottom) or 1.0)
    axes.set_ylabel("groups of a microbatch, GiB")


def _planned_bytes(rank: RankPlan, *, keeps: bool) -> int:
    groups = [group for stage in rank.stages for group in stage if group.keeps is keeps]
    return sum(group.nbytes for group in groups)


def draw_front(found: Front, path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw the time of a step against the limit.

    Args:
        found: Plans of :func:`front`.
        path: File, whose suffix names the format.
        title: Model, schedule and device, in words.

    Raises:
        ImportError: Matplotlib is not installed.
        OSError: The file cannot be written.
        ValueError: Its name ends otherwise than pictures do.
    """
    check_format(path)
    none = found.without_offload
    figure = new_figure(FRONT_HEIGHT_INCHES, layout="constrained")
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
    points = [("without offload", none, BLACK, "s")]
    if found.recomputed is not None:
        points.append(("all layers recomputed, nothing leaves", found.recomputed, ORANGE, "D"))
    for name, step, colour, marker in points:
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
