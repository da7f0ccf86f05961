"""Picture of plans: time against limits.

    draw_front(front(chooser), "front.png", title="Llama 8B on 4 H100")

Needs matplotlib: the extra ``plots``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import compress
from typing import Any

from pp_offload._common import pictures as art
from pp_offload._common.sizes import GIB
from pp_offload.plan.chooser import Front, peak_of

HEIGHT_INCHES = 4.0


def draw_front(front: Front, path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw the time of a step against the limit, in the format that the file's suffix names.

    Raises:
        ImportError: Matplotlib is not installed.
        OSError: The file cannot be written.
        ValueError: The suffix names no format of pictures.
    """
    art.check_format(path)
    without = front.without_offload
    figure = art.new_figure(HEIGHT_INCHES, layout="constrained")
    axes = figure.add_subplot()

    def draw(label: str, points: Sequence[tuple[float, float]], marker: str, **style: Any) -> None:
        gib, ms = [nbytes / GIB for nbytes, _ in points], [seconds * 1e3 for _, seconds in points]
        axes.plot(gib, ms, marker, label=label, **style)

    by_limit = [(plan.limit_bytes, plan.seconds) for plan in front.plans]
    partly = [any(any(rank.recomputed) for rank in plan.ranks) for plan in front.plans]
    draw("by a plan", by_limit, "o-", color=art.OFFLOAD, markersize=4)
    if recomputed := [*compress(by_limit, partly)]:
        circles = {"color": art.RECOMPUTE, "markersize": 8, "markerfacecolor": "none"}
        draw("with layers recomputed", recomputed, "o", **circles)
    draw("without offload", [(peak_of(without), without.seconds)], "s", color=art.DEVICE)
    if (every := front.recomputed) is not None:
        label = "all layers recomputed, nothing leaves"
        draw(label, [(peak_of(every), every.seconds)], "D", color=art.RECOMPUTE)
    axes.axhline(without.seconds * 1e3, color=art.DEVICE, linewidth=0.6, linestyle="--")
    axes.axvspan(0, by_limit[0][0] / GIB, color=art.FAINT, label="no plan was found")
    axes.set_xlim(left=0)
    axes.set_xlabel("limit of each device, GiB")
    axes.set_ylabel("step, ms")
    axes.grid(color=art.FAINT, linewidth=0.6)
    axes.legend(**art.LEGEND_ABOVE)
    figure.suptitle(title, fontsize=9, x=0.01, ha="left", wrap=True)
    art.save(figure, path)
