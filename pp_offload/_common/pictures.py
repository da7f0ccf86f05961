"""Colours, sizes and files of all pictures.

    figure = new_figure(height_inches=4.0)
    figure.add_subplot().plot(..., color=OFFLOAD)
    save(figure, "out.png")

Pictures need matplotlib: the extra ``plots``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")

WIDTH_INCHES, DOTS_PER_INCH = 8.0, 150
"""Width of a page on a code host, and enough dots for a sharp screen."""

# Colours of Okabe and Ito, and a ninth of Tol, which colour-blind people can distinguish.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE, YELLOW = "#0072B2", "#D55E00", "#CC79A7", "#F0E442"
WINE, GREY, FAINT, WHITE = "#882255", "#BBBBBB", "#DDDDDD", "#FFFFFF"

# A colour has one meaning in all pictures of steps and plans.
FORWARD, BACKWARD, OTHER_WORK = SKY, BLUE, GREY
OFFLOAD, RELOAD, DISK = GREEN, PURPLE, YELLOW
WAIT, RECOMPUTE = VERMILION, WINE
DEVICE, HOST = BLACK, ORANGE
"""Memory of the device, and of the host."""

LEGEND_ABOVE: dict[str, Any] = dict(
    loc="lower right", bbox_to_anchor=(1, 1), ncols=4, fontsize=8, frameon=False
)
"""Position of a legend above its axes, where nothing is drawn."""

NEEDS = "a picture needs matplotlib, which is not installed; pip install matplotlib"


def new_figure(height_inches: float, **options: Any) -> Figure:
    """Make an empty picture of the usual width."""
    try:
        from matplotlib.figure import Figure
    except ImportError as failure:
        raise ImportError(NEEDS) from failure
    return Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DOTS_PER_INCH, **options)


def check_format(path: str | os.PathLike[str]) -> None:
    """Raise a ValueError if no picture has the suffix of this file."""
    if Path(path).suffix not in FORMATS:
        raise ValueError(f"{path} ends otherwise than pictures do, expected {', '.join(FORMATS)}")


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a picture, without its date: an unchanged picture gives the same file."""
    dates: dict[str, Any] = {".png": {"Software": None}, ".svg": {"Date": None}}
    metadata = dates.get(Path(path).suffix, {"CreationDate": None})
    figure.savefig(path, dpi=DOTS_PER_INCH, metadata=metadata)
