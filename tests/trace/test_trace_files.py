"""Trace files: what is written is read, ranks are merged, and other files are refused.

And pictures of a step: each span where it was, a legend of what is shown, units.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.traces import check_file, timeline_of
from matplotlib.collections import PolyCollection
from matplotlib.colors import same_color
from matplotlib.figure import Figure

from pp_offload._common import pictures as art
from pp_offload.trace import Sample, Span, Timeline, merge_ranks, part_of, picture, read, write

BASE_NS = 1_700_000_000_000_000_001


def of_each_kind(rank: int = 0, base_ns: int = BASE_NS) -> Timeline:
    return Timeline(
        base_ns,
        [
            Span(rank, "d2h", "mlp (offload)", 0.5, 1.25, {"bytes": 3}),
            Span(rank, "compute", "mlp (forward)", 0.25, 4.0),
            Span(rank, "compute 2", "mlp (forward)", 0.25, 4.0),
            Span(rank, "h2d", "mlp (reload)", 2.0, 3.0),
        ],
        [Sample(rank, "host", 0.5, 0), Sample(rank, "host", 1.0, 7)],
        {rank: {"device": "cuda"}},
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write(of_each_kind(), path)
    assert read(path) == of_each_kind()
    assert check_file(path, 1) == {"M": 2 + 2 * 4, "X": 4, "C": 2}


def test_ranks_are_merged_on_one_clock(tmp_path: Path) -> None:
    """The second rank began 2 s later."""
    out = tmp_path / "out.json.gz"
    parts = [part_of(out, rank) for rank in range(2)]
    assert [part.name for part in parts] == ["out.rank0.json.gz", "out.rank1.json.gz"]
    write(of_each_kind(), parts[0])
    write(of_each_kind(1, BASE_NS + 2 * 10**9), parts[1])
    whole = merge_ranks(parts, out)
    assert read(out) == whole == read(*parts)
    check_file(out, 2)
    assert whole.base_ns == BASE_NS and whole.ranks == [0, 1]
    for track in ("d2h", "compute"):
        first, second = whole.of(0, track)[0], whole.of(1, track)[0]
        assert (second.begin_s, second.end_s) == (first.begin_s + 2, first.end_s + 2)
    assert [item.time_s for item in whole.counter(1, "host")] == [2.5, 3.0]


def test_files_of_the_same_rank_are_not_merged(tmp_path: Path) -> None:
    path, out = tmp_path / "a.json", tmp_path / "out.json"
    write(Timeline(5, metadata={1: {}}), path)
    with pytest.raises(ValueError, match="rank 1 is in two of the traces"):
        merge_ranks([path, path], out)
    assert not out.exists()


def test_other_files_are_refused_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    write(timeline_of(0), path)
    cut = path.read_bytes()[:100]
    for data in (b"not JSON", b"[]", b'{"traceEvents": []}', cut):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="expected a file that a Trace has written"):
            read(path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"found no file .*gz, expected one that a Trace"):
        read(path)


# Pictures


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
    expected = "100.0 ms, waited for copies 31.0 ms (31.0%), for other ranks 20.0 ms"
    titles = [axes.get_title(loc="left") for axes in figure.axes[::2]]
    assert titles == [f"rank 0: {expected}", f"rank 1: {expected}"]
    kinds = ["forward", "backward", "offload (d2h)", "reload (h2d)", "waits for a reload"]
    kinds += ["waits for a disk", "waits for other ranks"]
    memory = [f"memory: {name}" for name in ("device", "host", "in flight", "reloaded")]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == kinds + memory
    (text,) = figure.axes[0].texts
    assert text.get_text() == "waits for mlp (reload) 30 ms, the longest of its waits"
    device, *_ = figure.axes[1].lines
    assert list(device.get_xdata()) == pytest.approx([0, 20, 100])
    assert list(device.get_ydata()) == [4, 6, 6], "the value before the step holds at its begin"
