"""Random programs compute with offload what they compute without, bit for bit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import fuzzer
import pytest
from helpers.fuzz import run
from helpers.fuzz.campaign import Failure, explore
from helpers.fuzz.programs import Do, Forward, Group, Program, Step, drawn, script
from helpers.sessions import make_backend
from planted.faults import DEVICE

NUM_PROGRAMS = 50
ROOT = Path(__file__).parents[2]

SMALL = Program(stages=(((Group((Do("tanh"),)),),),), steps=(Step((Forward(),)),))

LARGEST = 16
"""The most records that the smallest program may have."""


@pytest.mark.quick(0, 1)
@pytest.mark.parametrize("seed", range(10))
def test_programs_agree(seed: int) -> None:
    counts, failure = explore(seed, NUM_PROGRAMS)
    assert failure is None, failure.script()
    assert counts["programs"] == NUM_PROGRAMS
    assert counts["offloaded"] > NUM_PROGRAMS / 3
    assert counts["computed again"] > NUM_PROGRAMS / 10


@pytest.mark.parametrize("fault", ["h2d ignores d2h", "compute ignores h2d"])
def test_a_planted_fault_is_found_and_made_small(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_faulty(kind: str, seed: int) -> object:
        backend = make_backend(kind, seed)
        if hasattr(backend, "new_stream"):
            DEVICE[fault].change(backend)
        return backend

    monkeypatch.setattr(run, "make_backend", make_faulty)
    failures = (explore(seed, 400)[1] for seed in range(1, 9))
    failure = next(f for f in failures if f and repr(f.program).count("(") <= LARGEST)
    monkeypatch.undo()
    run.check(failure.program)


def test_a_program_is_printed_as_code_that_runs() -> None:
    for seed in range(20):
        program, names = drawn(random.Random(seed)), dict[str, object]()
        exec(Failure(program, "two\nlines").script().rpartition("check(")[0], names)
        assert names["program"] == program


@pytest.mark.slow
def test_the_script_and_the_command_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "program.py"
    file.write_text(script(SMALL))
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    subprocess.run([sys.executable, file], check=True, env={**os.environ, "PYTHONPATH": paths})
    assert fuzzer.main(["--programs", "5", "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    assert "5 programs" in printed and "no failure; seed 3" in printed
