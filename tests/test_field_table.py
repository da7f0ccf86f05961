"""``python tools/field_table.py``: the table is what the tests are."""

from __future__ import annotations

from pathlib import Path

import field_table
import pytest

FILES = {
    "test_streams.py": '''
"""F07: waits go to
the live stream. And more."""
import pytest

pytestmark = pytest.mark.field("F07")

def no_test(): pass

def test_one(): pass

def test_two(): assert False
''',
    "test_holders.py": '''
"""F35 and F36: who holds what.

Details.
"""
import pytest

@pytest.mark.field("F36")
@pytest.mark.parametrize("n", [1, 2])
def test_leaf(n): pass

@pytest.mark.field("F35")
def test_other(): pytest.skip("no device")

def test_of_no_row(): pass
''',
    "checks.py": "@pytest.mark.field('F99')\ndef test_in_no_test_file(): pass",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Field tests of another project."""
    folder = tmp_path / "tests" / "field"
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text.lstrip())
    monkeypatch.setattr(field_table, "FOLDER", folder)
    return folder


def test_rows_are_found_by_the_marks_of_tests(folder: Path) -> None:
    assert field_table.find_rows(folder) == [
        field_table.Row("F07", "waits go to the live stream.", 2),
        field_table.Row("F35", "who holds what.", 1),
        field_table.Row("F36", "who holds what.", 1),
    ]


def test_tests_are_found_by_their_marks(folder: Path) -> None:
    assert field_table.find_tests(folder) == {
        "F07": {"test_streams.py::test_one", "test_streams.py::test_two"},
        "F35": {"test_holders.py::test_other"},
        "F36": {"test_holders.py::test_leaf"},
    }


def test_the_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert field_table.main(["--list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["row", "scenario", "tests"]
    assert [(line[0], line[-1]) for line in lines[1:]] == [("F07", "2"), ("F35", "1"), ("F36", "1")]


def test_results_and_exit_status(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert field_table.main(["--", "-p", "no:cacheprovider"]) == pytest.ExitCode.TESTS_FAILED
    _, *rows = capfd.readouterr().out.splitlines()
    ends = ["1 failed, 1 passed", "1 skipped", "2 passed"]
    assert [row.endswith("  " + end) for row, end in zip(rows, ends, strict=True)] == [True] * 3
    assert field_table.main(["--", "-k", "leaf"]) == 0
    out = capfd.readouterr().out
    assert "not run" in out and "2 passed" in out


def test_every_row_of_this_checkout_has_a_scenario() -> None:
    rows = field_table.find_rows(field_table.FOLDER)
    assert len(rows) == len({row.name for row in rows}) >= 20
    assert all(row.scenario.endswith(".") for row in rows)
