"""The list of planted faults fits the sources, and what runs it says what became of each."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from faults import MUTANTS
from field_faults import FIELD_MUTANTS
from field_table import FOLDER, find_tests
from runner import Mutant, Outcome, Runner, first_failure, main, planted

ROOT = Path(__file__).parents[1]
EACH = [*MUTANTS, *FIELD_MUTANTS]
ROWS = find_tests(FOLDER)


@cache
def code_of(file: str) -> str:
    """Without comments, and however it is laid out."""
    return ast.dump(ast.parse((ROOT / file).read_text()))


@pytest.mark.parametrize("mutant", EACH, ids=lambda mutant: mutant.name)
def test_every_mutant_applies(mutant: Mutant) -> None:
    changed = ast.parse(planted(mutant, (ROOT / mutant.file).read_text()))
    assert ast.dump(changed) != code_of(mutant.file), "it changes no code"
    for test in mutant.tests:
        file, *names = test.split("::")
        assert not names or f"def {names[-1].partition('[')[0]}(" in (ROOT / file).read_text()


def test_mutants_have_names_of_their_own() -> None:
    names = [mutant.name for mutant in EACH]
    assert len(set(names)) == len(names)


def test_every_row_of_the_field_table_has_a_mutant() -> None:
    assert {mutant.row for mutant in EACH if mutant.row} == set(ROWS)


@pytest.mark.parametrize("mutant", [one for one in EACH if one.row], ids=lambda mutant: mutant.row)
def test_what_catches_the_mutant_of_a_row_is_of_that_row(mutant: Mutant) -> None:
    tests = {test.removeprefix("tests/field/").partition("[")[0] for test in mutant.tests}
    assert tests and tests <= ROWS[mutant.row]


ADDS = Mutant("adds", "code.py", "a - b", "a + b", "sums", ("test_code.py",))
SAME = replace(ADDS, name="same", old="a - b", new="a - 1 * b", why="nothing differs")
GONE = replace(ADDS, name="gone", old="a / b")
TWICE = replace(ADDS, name="twice", old="a")
BROKEN = replace(ADDS, name="broken", new="a b")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One with a function and a test."""
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "code.py").write_text("def minus(a, b):\n    return a - b\n")
    (root / "test_code.py").write_text(
        "import importlib.util\n"
        "spec = importlib.util.spec_from_file_location('code', 'code.py')\n"
        "code = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(code)\n\n\n"
        "def test_minus():\n    assert code.minus(3, 1) == 2\n"
    )
    return root


def test_each_gets_its_verdict(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mutants = [ADDS, SAME, GONE, TWICE, BROKEN]
    before = (checkout / "code.py").read_text()
    verdicts = Runner(checkout, tmp_path / "copies").run(mutants, jobs=2)
    assert [verdict.outcome for verdict in verdicts] == [
        Outcome.CAUGHT,
        Outcome.SURVIVED,
        Outcome.NOT_THERE,
        Outcome.NOT_THERE,
        Outcome.UNDECIDED,
    ]
    assert verdicts[0].by == "test_code.py::test_minus"
    assert "0 times in code.py" in verdicts[2].by and "times in code.py" in verdicts[3].by
    assert (checkout / "code.py").read_text() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutants", "status"), [([ADDS], 0), ([ADDS, SAME], 1), ([GONE], 1), ([BROKEN], 1)]
)
def test_the_status_says_whether_all_were_caught(
    mutants: list[Mutant], status: int, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(mutants, ["--root", str(checkout)]) == status
    printed = capsys.readouterr().out
    assert all(f"{mutant.name} " in printed for mutant in mutants)
    assert f"{len(mutants) - status} of {len(mutants)} caught" in printed


def test_tests_that_fail_anyway_catch_nothing(checkout: Path, tmp_path: Path) -> None:
    (checkout / "code.py").write_text("def minus(a, b):\n    return a - b - 1\n")
    (verdict,) = Runner(checkout, tmp_path / "copies").run([ADDS])
    assert verdict.outcome is Outcome.UNDECIDED and not verdict.is_caught


@pytest.mark.slow
def test_what_its_own_tests_let_pass_the_suite_may_catch(checkout: Path, tmp_path: Path) -> None:
    (checkout / "test_other.py").write_text("def test_nothing():\n    pass\n")
    mutant = replace(ADDS, tests=("test_other.py",))
    assert Runner(checkout, tmp_path / "a").run([mutant])[0].outcome is Outcome.SURVIVED
    (verdict,) = Runner(checkout, tmp_path / "b", suite=True).run([mutant])
    assert verdict.is_caught and verdict.by == "test_code.py::test_minus"


def test_only_those_that_are_named(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([ADDS, SAME], ["--list", "--only", "same"]) == 0
    assert capsys.readouterr().out == "same: code.py: nothing differs\n"
    of_row = replace(ADDS, row="F17")
    for chosen in (["--only", "F17"], ["--rows"]):
        assert main([of_row, SAME], ["--list", *chosen]) == 0
        assert capsys.readouterr().out == "F17: adds: code.py: sums\n"
    assert main([ADDS], ["--only", "other"]) == 2
    assert "no mutant is named ['other']" in capsys.readouterr().err


@pytest.mark.slow
def test_a_fault_in_the_engine_itself_is_caught(tmp_path: Path) -> None:
    mutant = Mutant(
        "round trip",
        "pp_offload/_memory/disk_file.py",
        "self._transfer(file, extent, views, self._pread) != extent.checksum",
        "self._transfer(file, extent, views, self._pread) is None",
        "nothing is compared",
        ("tests/memory/test_disk_file.py::test_a_flipped_bit_is_an_error",),
    )
    (verdict,) = Runner(ROOT, tmp_path / "copies").run([mutant])
    assert verdict.is_caught, verdict.by


def test_the_first_failure_is_the_one_that_is_told() -> None:
    summary = "FAILED tests/a.py::b[c d] - assert x - y\nFAILED tests/a.py::e\n"
    assert first_failure(summary) == "tests/a.py::b[c d]"
    assert first_failure("Traceback ...\n") == "Traceback ..."
