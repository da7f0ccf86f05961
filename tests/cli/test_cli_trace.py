"""``pp-offload trace``: a row for each rank, a picture, and every error as a new user meets it."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest
from helpers.traces import timeline_of
from typer.testing import CliRunner

from pp_offload.cli.app import app
from pp_offload.trace import Span, Timeline, part_of, read, write
from pp_offload.trace.figures import figures_of


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "out.json.gz"
    write(timeline_of(0, 1), path)
    return path


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["trace", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def rows_of(output: str) -> dict[str, dict[str, str]]:
    """Cells by column, by rank."""
    lines = output.splitlines()
    head = next(line for line in lines if line.startswith("rank"))
    names = head.replace("for reload", "for_reload").replace("peak in", "peak_in").split("  ")
    names = [name.strip() for name in names if name.strip()]
    found = [line.split() for line in lines if line[:1].isdigit()]
    return {row[0]: dict(zip(names, row, strict=True)) for row in found}


def test_a_row_for_each_rank(file: Path) -> None:
    code, output = run(file)
    assert code == 0, output
    assert output.startswith("step 5; the trace has step 5\n")
    rows = rows_of(output)
    assert list(rows) == ["0", "1"]
    expected = {"step ms": "100.0", "busy": "-", "for_reload": "30.0", "offload": "0.0"}
    expected |= {"disk": "1.0", "others": "20.0", "off GB/s": "21.5", "back GB/s": "53.7"}
    expected |= {"peak device": "6.000", "peak host": "1.000"}
    assert rows["1"] | expected == rows["1"]


def test_files_of_ranks_are_taken_together(tmp_path: Path) -> None:
    files = [part_of(tmp_path / "out.json.gz", rank) for rank in range(2)]
    for rank, path in enumerate(files):
        write(timeline_of(rank), path)
    code, output = run(*files)
    assert code == 0 and list(rows_of(output)) == ["0", "1"]


def test_one_rank(file: Path) -> None:
    assert list(rows_of(run(file, "--rank", 1)[1])) == ["1"]


def test_figures_as_json(file: Path) -> None:
    code, output = run(file, "--json", "--rank", 1)
    assert code == 0
    found = json.loads(output)
    assert found["step"] == 5
    (rank,) = found["ranks"]
    (expected,) = (one for one in figures_of(read(file), 5) if one.rank == 1)
    assert rank["rank"] == 1 and rank["seconds"] == expected.seconds
    assert rank["waited_s"] == {kind.value: s for kind, s in expected.waited_s.items()}
    assert rank["offload_bytes_per_s"] == expected.offload_bytes_per_s


def test_a_disk_has_columns_where_there_is_one(tmp_path: Path) -> None:
    timeline = timeline_of(0)
    assert not any("GiB" in name for name in rows_of(run(_written(timeline, tmp_path))[1])["0"])
    timeline.spans.append(Span(0, "disk", "write", 1.03, 1.05, {"bytes": 2**29}))
    row = rows_of(run(_written(timeline, tmp_path))[1])["0"]
    assert (row["written GiB"], row["read GiB"]) == ("0.500", "0.000")


def _written(timeline: Timeline, folder: Path) -> Path:
    write(timeline, folder / "out.json")
    return folder / "out.json"


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("is_truncated", "ranks 1: recording stopped early"),
        ("has_captures", "ranks 1: what was captured in a CUDA graph is missing"),
        ("began_anew", "ranks 1: configure() made another engine"),
    ],
)
def test_what_the_figures_lack_is_said(key: str, said: str, tmp_path: Path) -> None:
    timeline = timeline_of(0, 1)
    assert said not in run(_written(timeline, tmp_path))[1]
    timeline.metadata[1][key] = True
    assert said in run(_written(timeline, tmp_path))[1]


def test_a_picture(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    code, output = run(file, "--png", out, "--rank", 1, "--step", 5, "--predicted", file)
    assert code == 0 and output == f"step 5 of ranks 1 is in {out}\n"
    assert out.read_bytes()[1:4] == b"PNG"
    alone = tmp_path / "alone.png"
    run(file, "--png", alone, "--rank", 1)
    assert alone.read_bytes() != out.read_bytes(), "without what was predicted"


WRONG = {
    "FILE --step 4": "step is 4, expected one of the trace: [5]",
    "FILE --rank 2": "found 2, expected one that has step 5: [0, 1]",
    "FILE --predicted FILE": "it is drawn, not printed; add --png out.png",
    "FILE --png out.png --json": "a picture has none",
    "FILE --png out.gif": "out.gif ends otherwise than pictures do, expected .png, .svg, .pdf",
    "FILE --png nowhere/out.png": "expected a file in a directory that is there",
    "FILE --png out.png --predicted nothing.json": "found no file nothing.json",
    "FILE --png out.png --predicted EMPTY": "the trace has no step",
    "nothing.json": "found no file nothing.json, expected one that a Trace has written",
    "merged.json": "found merged.rank0.json, merged.rank1.json: give these instead, or merge",
    "FILE FILE": "rank 0 is in two of the traces",
    "EMPTY": "the trace has no step, expected one that ended while it was recorded",
    "TEXT": "cannot be read as a trace",
    "OTHERS": "expected a file that a Trace has written",
    "CUT": "cannot be read as a trace",
}


@pytest.mark.parametrize("typed", WRONG)
def test_wrong_options_are_explained(
    typed: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Timeline(0, metadata={0: {}}), "EMPTY")
    for rank in range(2):
        write(Timeline(0), f"merged.rank{rank}.json")
    Path("TEXT").write_text("not JSON\n")
    Path("OTHERS").write_bytes(gzip.compress(b'{"traceEvents": []}'))
    Path("CUT").write_bytes(file.read_bytes()[:100])
    code, output = run(*typed.replace("FILE", file.name).split())
    assert code == 2 and WRONG[typed] in output, output
    assert "Traceback" not in output


def test_without_matplotlib_it_says_what_to_install(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, output = run(file, "--png", tmp_path / "out.png")
    assert code == 2 and "pip install matplotlib" in output
