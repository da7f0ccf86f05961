"""``pp-offload compare``: a plan, a run by it, and what a new user gives by mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pp_offload.cli.app import app
from pp_offload.trace import Timeline, part_of, write

SMALL = "cli_models:good --microbatches 4 --length 256 --min-numel 1 --ranks".split()


@pytest.fixture(autouse=True)
def _beside_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return " ".join(done.output.replace("│", " ").split())


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = str(tmp_path / "plan.json")
    run("plan", *SMALL, "2", "--limit", "560kB", "-o", path)
    return path


def test_a_run_by_the_plan(plan: str, tmp_path: Path) -> None:
    trace = str(tmp_path / "out.json.gz")
    run("simulate", *SMALL, "2", "--plan", plan, "--trace", trace)
    output = run("compare", plan, trace)
    assert output.startswith("cli_models:good on 2 virtual H100, 1f1b") and "step 1" in output
    assert output.endswith("nothing is worse than planned by more than 2%")
    found = json.loads(run("compare", plan, trace, "--json"))
    assert [one["planned"]["peak_bytes"] for one in found["ranks"]] == [
        one["found"]["peak_bytes"] for one in found["ranks"]
    ]
    first = json.loads(run("compare", plan, trace, "--step", "0", "--json"))
    assert first["as_planned"] and found["as_planned"]
    assert "step is 9, expected one of the trace: [0, 1]" in run(
        "compare", plan, trace, "--step", "9", code=2
    )


def test_a_run_of_something_else(plan: str, tmp_path: Path) -> None:
    trace = str(tmp_path / "out.json.gz")
    other = "cli_models:good --microbatches 6 --length 256 --min-numel 1 --ranks 2".split()
    run("simulate", *other, "--plan", plan, "--trace", trace, code=1)
    output = run("compare", plan, trace, code=1)
    assert "the plan is of 4 microbatches in a step, which has 6" in output
    assert "nothing" not in output


def test_what_cannot_be_right(plan: str, tmp_path: Path) -> None:
    trace = str(tmp_path / "out.json.gz")
    run("simulate", *SMALL, "4", "--trace", trace)
    assert "the plan is for 2 pipeline ranks, and this is rank 2" in run(
        "compare", plan, trace, code=2
    )
    assert "holds no plan" in run("compare", "cli_models.py", trace, code=2)
    assert "holds no plan, for it is no text" in run("compare", trace, plan, code=2)
    assert "No such file" in run("compare", "nowhere.json", trace, code=2)
    assert "found no file nowhere.json.gz" in run("compare", plan, "nowhere.json.gz", code=2)
    write(Timeline(0), part_of(tmp_path / "all.json.gz", 0))
    output = run("compare", plan, str(tmp_path / "all.json.gz"), code=2)
    assert "found all.rank0.json.gz: give these instead, or merge them" in output
    assert "cannot be read as a trace" in run("compare", plan, "cli_models.py", code=2)
