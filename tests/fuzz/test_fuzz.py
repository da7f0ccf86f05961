"""Random programs compute with offload what they compute without, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fuzzer
import pytest
from helpers.fuzz import campaign
from helpers.fuzz.campaign import Failure, explore
from helpers.fuzz.programs import (
    Commit,
    Compute,
    Enter,
    Exit,
    Forward,
    Options,
    Program,
    Region,
    Step,
    script,
)

NUM_PROGRAMS = 50
ROOT = Path(__file__).parents[2]

SMALL = Program(
    stages=(((Enter(), Compute("tanh"), Exit(), Commit()),),), steps=(Step((Forward(),)),)
)


@pytest.mark.quick(0, 1, 2)
@pytest.mark.parametrize("seed", range(10))
def test_programs_agree(seed: int) -> None:
    totals = explore(seed, NUM_PROGRAMS)
    assert not totals.failures, totals.failures[0].script()
    assert totals.counts["programs"] == NUM_PROGRAMS
    assert totals.counts["offloaded"] > NUM_PROGRAMS / 3
    assert totals.counts["computed again"] > NUM_PROGRAMS / 10


@pytest.mark.slow
def test_a_program_is_printed_as_code_that_runs(tmp_path: Path) -> None:
    group = (Enter("b"), Compute("linear"), Compute("mul", 0, 3), Exit(), Commit("b", release=2))
    program = Program(
        stages=(((Compute("tanh"), *group, Region(group)),), ((Compute("sin", 1),), group)),
        steps=(Step((Forward(), Forward(1, is_held=True)), "lifo"), Step((Forward(rows=5),))),
        options=Options(prefetch_bytes=64),
    )
    names: dict[str, object] = {}
    exec(Failure(program, "two\nlines").script(), names)
    assert names["program"] == program
    file = tmp_path / "program.py"
    file.write_text(script(SMALL))
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    subprocess.run([sys.executable, file], check=True, env={**os.environ, "PYTHONPATH": paths})


@pytest.mark.slow
def test_the_command_prints_its_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzzer.main(["--programs", "5", "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    assert "5 programs, 0 failures" in printed and "seed 3" in printed


def test_the_command_prints_what_fails_and_its_status_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = campaign.Totals([Failure(SMALL, "it differs")])
    monkeypatch.setattr(campaign, "in_processes", lambda work, jobs: iter([failed]))
    assert fuzzer.main(["--programs", "5"]) == 1
    assert script(SMALL) in capsys.readouterr().out
