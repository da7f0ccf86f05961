"""What all pictures have in common: colours, sizes, and how a file is written.

    figure = new_figure(height_inches=4.0)
    figure.add_subplot().plot(..., color=BLUE)
    save(figure, "out.png")

They take matplotlib: the extra ``plots``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")

WIDTH_INCHES, DOTS_PER_INCH = 8.0, 150
"""As wide as a page of a code host shows it, with dots enough for a screen that has more."""

# The colours of Okabe and Ito, which colour-blind people tell apart.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE, YELLOW = "#0072B2", "#D55E00", "#CC79A7", "#F0E442"
GREY, WHITE = "#BBBBBB", "#FFFFFF"
FAINT = "#DDDDDD"
"""Of lines and fields behind the others."""

NEEDS = "a picture needs matplotlib, which is not installed; pip install matplotlib"


def new_figure(height_inches: float, **options: Any) -> Figure:
    """An empty picture of the usual width.

    Raises:
        ImportError: There is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as failure:
        raise ImportError(NEEDS) from failure
    return Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DOTS_PER_INCH, **options)


def check_format(path: str | os.PathLike[str]) -> None:
    """Check how the name of a picture's file ends.

    Raises:
        ValueError: Pictures do not end so.
    """
    if Path(path).suffix not in FORMATS:
        raise ValueError(f"{path} ends otherwise than pictures do, expected {', '.join(FORMATS)}")


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write it.

    Raises:
        OSError: The file cannot be written.
    """
    figure.savefig(path, dpi=DOTS_PER_INCH, metadata=_unchanging(Path(path)))


def _unchanging(path: Path) -> dict[str, Any]:
    """Or the same picture would be another file each time."""
    return {".png": {"Software": None}, ".svg": {"Date": None}}.get(
        path.suffix, {"CreationDate": None}
    )
