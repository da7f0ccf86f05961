"""``pp-offload trace`` and ``compare``: tables, figures, a picture, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.cli import check_refused, good, run
from helpers.traces import GIB, timeline_of

from pp_offload.trace import Span, Timeline, part_of, read, write
from pp_offload.trace.figures import rank_steps


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "out.json.gz"
    write(timeline_of(0, 1), path)
    return path


def rows_of(output: str) -> dict[str, dict[str, str]]:
    """Cells by column, by rank."""
    lines = output.splitlines()
    head = next(line for line in lines if line.startswith("rank")).replace(" peak", "  peak")
    names = [name.strip() for name in head.split("  ") if name.strip()]
    rows = [line.split() for line in lines if line[:1].isdigit()]
    return {row[0]: dict(zip(names, row, strict=True)) for row in rows}


def test_a_row_for_each_rank(file: Path) -> None:
    output = good("trace", file)
    assert output.startswith("step 5; the trace has step 5\n")
    rows = rows_of(output)
    assert list(rows) == ["0", "1"]
    expected = {"step ms": "100.0", "busy": "-", "for reload": "30.0", "offload": "0.0"}
    expected |= {"disk": "1.0", "others": "20.0", "off GB/s": "21.5", "back GB/s": "53.7"}
    expected |= {"peak device": "6.000", "peak host": "1.000"}
    assert rows["1"] | expected == rows["1"]
    assert list(rows_of(good("trace", file, "--rank", 1))) == ["1"]
    files = [part_of(file, rank) for rank in range(2)]
    for rank, path in enumerate(files):
        write(timeline_of(rank), path)
    assert list(rows_of(good("trace", *files))) == ["0", "1"], "files of ranks"
    (rank,) = json.loads(good("trace", file, "--json", "--rank", 1))["ranks"]
    step = rank_steps(read(file), 5)[1]
    assert rank["rank"] == 1 and rank["seconds"] == step.end_s - step.begin_s
    assert rank["waited_s"] == {kind.value: s for kind, s in step.waited_s.items()}


def test_a_disk_has_columns_and_missing_spans_a_caution(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    timeline = timeline_of(0, 1)
    write(timeline, path)
    output = good("trace", path)
    assert "written GiB" not in output and "ranks 1" not in output
    timeline.spans += [
        Span(0, "disk 2", "write", 1.03, 1.05, {"bytes": GIB // 2}),
        Span(0, "d2h", "mlp (offload)", 0.99, 1.005, {"bytes": GIB}),  # began before the step
        Span(0, "h2d", "mlp (reload)", 1.08, 1.1, {"bytes": GIB}),
        Span(0, "compute 2", "waits for mlp (offload)", 0.99, 1.002),
    ]
    timeline.metadata[1]["has_captures"] = True
    write(timeline, path)
    output = good("trace", path)
    assert "ranks 1: work of captured CUDA graphs is missing" in output
    expected = {"written GiB": "0.500", "read GiB": "0.000", "offload": "2.0"}
    expected |= {"off GB/s": "21.5", "back GB/s": "53.7", "peak host": "1.000"}
    assert rows_of(output)["0"] | expected == rows_of(output)["0"]


def test_a_picture(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.png"
    output = good("trace", file, "--png", out, "--rank", 1, "--step", 5)
    assert output == f"step 5 of ranks 1 is in {out}\n"
    assert out.read_bytes()[1:4] == b"PNG"
    assert json.loads(good("trace", file, "--png", out, "--json"))["ranks"]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    check_refused(f"trace {file} --png {out}", "pip install matplotlib")


SIZES = "helpers.cli_models:good --ranks 2 --length 256 --min-numel 1 --microbatches".split()


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    good("plan", *SIZES, 4, "--limit", "560kB", "-o", path)
    return path


def test_a_run_beside_its_plan_and_one_of_something_else(plan: Path, tmp_path: Path) -> None:
    trace = tmp_path / "run.json.gz"
    good("simulate", *SIZES, 4, "--plan", plan, "--trace", trace)
    output = good("compare", plan, trace)
    assert output.startswith("helpers.cli_models:good on 2 virtual H100, 1f1b")
    assert output.endswith("nothing is worse than planned by more than 2%\n")
    figures = json.loads(good("compare", plan, trace, "--json", "--step", 0))
    assert figures["as_planned"] and figures["step"] == 0
    run("simulate", *SIZES, 6, "--plan", plan, "--trace", trace)
    code, output = run("compare", plan, trace)
    assert code == 1
    assert "the plan is of 4 microbatches in a step, which has 6" in output


WRONG = {
    "trace FILE --step 4": "--step: step is 4, expected one of the trace: [5]",
    "trace FILE --rank 2": "found 2, expected one that has step 5: [0, 1]",
    "trace FILE --png out.gif": "out.gif ends otherwise than pictures do, expected .png, .svg",
    "trace EMPTY": "--step: the trace has no step",
    "trace nothing.json": "FILE: found no file nothing.json",
    "trace TEXT": "cannot be read as a trace",
    "compare PLAN FILE --step 9": "PLAN or --step: step is 9, expected one of the trace: [5]",
    "compare TEXT FILE": "PLAN: TEXT holds no plan",
    "compare nothing.json FILE": "PLAN: [Errno 2] No such file",
    "compare PLAN THREE": "PLAN or --step: the plan is for 2 pipeline ranks, and this is rank 2",
}


@pytest.mark.parametrize("typed", WRONG)
def test_what_cannot_be_right_is_refused(
    typed: str, plan: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Timeline(0, metadata={0: {}}), "EMPTY")
    write(timeline_of(0, 1, 2), "THREE")
    Path("TEXT").write_text("not JSON\n")
    check_refused(typed.replace("FILE", file.name).replace("PLAN", str(plan)), WRONG[typed])
