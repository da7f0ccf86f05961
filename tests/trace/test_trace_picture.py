"""Pictures of a step: each span where it was, a legend of what is shown, units."""

from __future__ import annotations

import pytest
from helpers.traces import timeline_of
from matplotlib.collections import PolyCollection
from matplotlib.colors import same_color
from matplotlib.figure import Figure

from pp_offload._common import pictures as art
from pp_offload.trace import Span, picture


def bars(figure: Figure, colour: str) -> list[tuple[float, float, float]]:
    """Begin and end in ms, and the row, of bars of a colour in the rows of the first rank."""
    boxes = [
        (path.get_extents().x0, path.get_extents().x1, path.get_extents().y0 + 0.4)
        for collection in figure.axes[0].collections
        if isinstance(collection, PolyCollection)
        for path in collection.get_paths()
        if same_color(collection.get_facecolor()[0], colour)
    ]
    return sorted((round(x0, 6), round(x1, 6), round(row, 6)) for x0, x1, row in boxes)


def test_each_span_is_where_it_was() -> None:
    timeline = timeline_of(0)
    timeline.spans.append(Span(0, "disk 2", "read", 1.06, 1.07, {"bytes": 1}))
    figure = picture.picture(timeline)
    assert bars(figure, art.FORWARD) == [(0, 20, 3)] and bars(figure, art.BLUE) == [(40, 100, 3)]
    assert bars(figure, art.VERMILION) == [(50, 80, 3), (85, 86, 3)]
    assert bars(figure, art.WHITE) == [(20, 40, 3)]
    assert bars(figure, art.GREEN) == [(10, 60, 2)] and bars(figure, art.PURPLE) == [(60, 80, 1)]
    assert bars(figure, art.DISK) == [(60, 70, 0)]
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert rows == ["disk", "h2d", "d2h", "compute"], "from the bottom"
    timeline.spans.append(Span(0, "operators", "operators", 1.01, 1.05))
    figure = picture.picture(timeline)
    assert bars(figure, art.FORWARD) == [(10, 20, 3)], "compute of groups is that of operators"
    assert bars(figure, art.GREY) == [(10, 50, 3)]


def test_titles_axes_and_legend() -> None:
    figure = picture.picture(timeline_of(0, 1))
    assert figure.axes[-1].get_xlabel() == "time since the begin of step 5, ms"
    assert [axes.get_ylabel() for axes in figure.axes[1::2]] == ["memory, GiB"] * 2
    expected = "100.0 ms, waited for copies 31.0 ms (31.0%), for other ranks 20.0 ms"
    titles = [axes.get_title(loc="left") for axes in figure.axes[::2]]
    assert titles == [f"rank 0: {expected}", f"rank 1: {expected}"]
    kinds = ["forward", "backward", "offload (d2h)", "reload (h2d)", "waits for a reload"]
    kinds += ["waits for a disk", "waits for other ranks"]
    memory = [f"memory: {name}" for name in ("device", "host", "in flight", "reloaded")]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == kinds + memory
    (text,) = figure.axes[0].texts
    assert text.get_text() == "waits for mlp (reload) 30 ms, the longest of its waits"
    device, host, *_ = figure.axes[1].lines
    assert device.get_drawstyle() == "steps-post"
    assert list(device.get_xdata()) == pytest.approx([0, 20, 100])
    assert list(device.get_ydata()) == [4, 6, 6], "the value before the step holds at its begin"
    assert list(host.get_xdata()) == pytest.approx([10, 100])
