"""Pictures of traces: each span where it was, a legend of what is shown, units on the axes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import same_color
from matplotlib.figure import Figure
from matplotlib.image import imread

from pp_offload.trace import Sample, Span, Timeline, picture
from pp_offload.trace.timeline import WAITS_FOR_UNKNOWN as UNKNOWN
from pp_offload.trace.figures import Kind
from pp_offload.trace.timeline import WAITS_FOR_OTHERS as OTHER_WORK

GIB = 2**30


def spans_of(rank: int) -> list[Span]:
    """A step of 100 ms, from 1 s on."""
    named = [
        ("compute", "mlp (forward)", 0, 20),
        ("compute", "mlp (backward)", 40, 100),
        ("compute", "waits for mlp (reload)", 50, 80),
        ("compute", UNKNOWN, 85, 86),
        ("compute", OTHER_WORK, 20, 40),
        ("d2h", "mlp (offload)", 10, 60),
        ("h2d", "mlp (reload)", 60, 80),
    ]
    return [Span(rank, "steps", "step 5", 1.0, 1.1, {"step": 5})] + [
        Span(rank, track, name, 1 + begin / 1e3, 1 + end / 1e3, {"bytes": GIB})
        for track, name, begin, end in named
    ]


def timeline_of(*ranks: int) -> Timeline:
    samples = [
        Sample(rank, counter, 1 + time / 1e3, nbytes)
        for rank in ranks
        for counter, time, nbytes in (
            ("device", -10, 4 * GIB),
            ("device", 20, 6 * GIB),
            ("host", 10, GIB),
            ("in flight", 10, GIB // 2),
            ("reloaded", 60, GIB // 4),
        )
    ]
    spans = [one for rank in ranks for one in spans_of(rank)]
    return Timeline(0, spans, samples, metadata={rank: {} for rank in ranks})


def bars(figure: Figure, colour: str) -> list[tuple[float, float, float]]:
    """Begin and end in ms, and the row, of what has a colour in the first rank's rows."""
    found = []
    for collection in figure.axes[0].collections:
        if isinstance(collection, PolyCollection):
            for path in collection.get_paths():
                if same_color(collection.get_facecolor()[0], colour):
                    box = path.get_extents()
                    row = round((box.y0 + box.y1) / 2, 6)
                    found.append((round(box.x0, 6), round(box.x1, 6), row))
    return sorted(found)


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_each_span_is_where_it_was() -> None:
    figure = picture.picture(timeline_of(0))
    assert bars(figure, picture.SKY) == [(0, 20, 2)]
    assert bars(figure, picture.BLUE) == [(40, 50, 2), (80, 85, 2), (86, 100, 2)]
    assert bars(figure, picture.VERMILION) == [(50, 80, 2), (85, 86, 2)]
    assert bars(figure, "#FFFFFF") == [(20, 40, 2)]
    assert bars(figure, picture.GREEN) == [(10, 60, 1)]
    assert bars(figure, picture.PURPLE) == [(60, 80, 0)]
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert rows == ["h2d", "d2h", "compute"], "from the bottom"


def test_a_disk_has_a_row_where_there_is_one() -> None:
    timeline = timeline_of(0)
    timeline.spans.append(Span(0, "disk", "write", 1.03, 1.05, {"bytes": 1}))
    timeline.spans.append(Span(0, "disk 2", "read", 1.06, 1.07, {"bytes": 1}))
    figure = picture.picture(timeline)
    assert bars(figure, picture.ORANGE) == [(30, 50, 0)]
    assert bars(figure, picture.YELLOW) == [(60, 70, 0)]
    assert bars(figure, picture.SKY) == [(0, 20, 3)]
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert rows == ["disk", "h2d", "d2h", "compute"]
    assert {"write to disk", "read from disk"} < set(texts(figure))


def test_axes_have_units_and_the_title_has_the_numbers() -> None:
    figure = picture.picture(timeline_of(0, 1))
    assert len(figure.axes) == 4
    assert figure.axes[-1].get_xlabel() == "time since the begin of step 5, ms"
    assert [axes.get_ylabel() for axes in figure.axes[1::2]] == ["memory, GiB"] * 2
    expected = "100.0 ms, waited for copies 31.0 ms (31.0%), for other ranks 20.0 ms"
    titles = [axes.get_title(loc="left") for axes in figure.axes[::2]]
    assert titles == [f"rank 0: {expected}", f"rank 1: {expected}"]
    assert figure.axes[0].get_xlim() == (0, pytest.approx(100))


def test_the_longest_wait_says_what_it_is_for() -> None:
    figure = picture.picture(timeline_of(0))
    (said,) = [text for text in figure.axes[0].texts if text.get_text()]
    assert said.get_text() == "waits for mlp (reload) 30 ms, the longest of its waits"
    assert said.xy[0] == pytest.approx(65)


def test_a_long_name_does_not_make_the_picture_narrow() -> None:
    def width(timeline: Timeline) -> float:
        figure = picture.picture(timeline)
        figure.draw_without_rendering()
        return figure.axes[0].get_position().width

    short, long = timeline_of(0), timeline_of(0)
    name = f"waits for {'mlp' * 60} (reload)"
    long.spans = [
        replace(one, name=name) if one.name == "waits for mlp (reload)" else one
        for one in long.spans
    ]
    assert width(long) == width(short)


def test_a_wait_that_nobody_sees_is_not_pointed_at() -> None:
    timeline = timeline_of(0)
    timeline.spans = [one for one in timeline.spans if not one.name.startswith("waits for mlp")]
    timeline.spans = [
        replace(one, end_s=one.begin_s + 1e-4) if one.name == UNKNOWN else one
        for one in timeline.spans
    ]
    assert not picture.picture(timeline).axes[0].texts


def test_the_legend_has_what_is_shown_and_nothing_else() -> None:
    kinds = ["forward", "backward", "offload (d2h)", "reload (h2d)", "waits for a reload"]
    kinds += ["waits for a disk", "waits for other ranks"]
    memory = [f"memory: {name}" for name in ("device", "host", "in flight", "reloaded")]
    assert texts(picture.picture(timeline_of(0))) == kinds + memory


def test_bytes_are_steps_in_their_unit() -> None:
    axes = picture.picture(timeline_of(0)).axes[1]
    device, host, *_ = axes.lines
    assert device.get_drawstyle() == "steps-post"
    assert list(device.get_xdata()) == pytest.approx([0, 20, 100])
    assert list(device.get_ydata()) == [4, 6, 6], "what was said before holds at the begin"
    assert list(host.get_xdata()) == pytest.approx([10, 100])
    small = timeline_of(0)
    small.samples = [replace(one, nbytes=one.nbytes // 1024) for one in small.samples]
    assert picture.picture(small).axes[1].get_ylabel() == "memory, MiB"


def test_what_was_predicted_is_dashed_over_it() -> None:
    predicted = timeline_of(0)
    predicted.spans[0] = Span(0, "steps", "step 0", 1.0, 1.2, {"step": 0})
    figure = picture.picture(timeline_of(0, 1), predicted=predicted)
    dashed = [line for line in figure.axes[1].lines if line.is_dashed()]
    assert list(dashed[0].get_xdata()) == pytest.approx([0, 20, 200])
    assert dashed[-1].get_xdata() == pytest.approx([200, 200]), "the step's predicted end"
    assert len(dashed) == 5
    assert not any(line.is_dashed() for line in figure.axes[3].lines), "rank 1 was not predicted"
    assert figure.axes[0].get_xlim() == (0, pytest.approx(200))
    assert texts(figure)[-1] == "predicted"


def test_a_recording_that_stopped_says_so() -> None:
    timeline = timeline_of(0)
    timeline.metadata[0]["is_truncated"] = True
    title = picture.picture(timeline).axes[0].get_title(loc="left")
    assert title.endswith("; the recording stopped early")


def test_waits_are_told_apart_without_colours() -> None:
    """By how they are hatched: all but one, and each otherwise."""
    hatches = [picture.HATCH[kind] for kind in Kind if kind in picture.HATCH]
    assert len(set(hatches)) == len(hatches) == 4


def test_the_file_is_as_wide_as_a_page(tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    picture.draw(timeline_of(0), path)
    assert imread(path).shape[1] == 1200
    first = path.read_bytes()
    picture.draw(timeline_of(0), path)
    assert path.read_bytes() == first


@pytest.mark.parametrize("suffix", [".svg", ".pdf"])
def test_other_formats(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"out{suffix}"
    picture.draw(timeline_of(0), path)
    assert path.read_bytes()[:5] == {".svg": b"<?xml", ".pdf": b"%PDF-"}[suffix]


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("out.gif", {}, r"out.gif ends otherwise than pictures do, expected \.png, \.svg, \.pdf"),
    ("out.png", {"ranks": [2]}, r"rank 2 has no step 5 in the trace, expected some of \[0\]"),
    ("out.png", {"step": 4}, r"step is 4, expected one of the trace: \[5\]"),
]


@pytest.mark.parametrize(("name", "options", "said"), WRONG)
def test_wrong_arguments_are_explained(
    name: str, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        picture.draw(timeline_of(0), tmp_path / name, **options)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        picture.draw(timeline_of(0), tmp_path / "out.png")
