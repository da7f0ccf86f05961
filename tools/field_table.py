"""The field tests as a table: what fails in engines elsewhere, and whether it is right here.

A row is a number; its tests are those under ``tests/field`` that are marked with it, or whose file
is, and its scenario is the first sentence of their file's docstring. So a new file is a new row,
and there is no list. As a plugin of pytest, which this is too, it writes rows into the report.

    python tools/field_table.py          # runs them; exits with 1 if one fails
    python tools/field_table.py --list   # only lists them
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    import pytest

FOLDER = Path(__file__).parents[1] / "tests" / "field"

_ROWS = re.compile(r"(F\d\d(?:(?:, | and )F\d\d)*): *")
_OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}
_SCENARIO_WIDTH = 72


@dataclass(frozen=True)
class Row:
    """One failure of the field."""

    name: str
    """``F07``."""

    scenario: str
    """What must be right."""

    num_tests: int
    """Test functions, before parameters."""


def row_of(item: pytest.Item) -> str | None:
    """``F07`` for a test with ``pytest.mark.field("F07")``; None for a test of no row."""
    mark = item.get_closest_marker("field")
    return None if mark is None else mark.args[0]


def pytest_itemcollected(item: pytest.Item) -> None:
    """What is said of it, is said of its row."""
    if (row := row_of(item)) is not None:
        item.user_properties.append(("field", row))


def find_rows(folder: Path) -> list[Row]:
    """The rows that have tests in ``folder``, in order; nothing is imported.

    Raises:
        FileNotFoundError: There is no such folder, as in an installation without a checkout.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there are no field tests at {folder}; they come with the sources and are not "
            "installed: run this in a checkout, with the package installed by pip install -e ."
        )
    found = [one for path in sorted(folder.glob("test_*.py")) for one in _rows_in(path)]
    return sorted(found, key=lambda row: row.name)


def _rows_in(path: Path) -> Iterator[Row]:
    tree = ast.parse(path.read_text())
    counts = Counter(row for _, rows in _tests_in(tree) for row in rows)
    scenario = _scenario(ast.get_docstring(tree) or "")
    return (Row(name, scenario, number) for name, number in counts.items())


def find_tests(folder: Path) -> dict[str, set[str]]:
    """By row, its test functions, such as ``test_affinity.py::test_no_option_moves_a_thread``."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in folder.glob("test_*.py"):
        for name, rows in _tests_in(ast.parse(path.read_text())):
            for row in rows:
                found[row].add(f"{path.name}::{name}")
    return dict(found)


def _tests_in(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Each test function, and its rows."""
    assigned = (node for node in tree.body if isinstance(node, ast.Assign))
    of_file = [row for node in assigned for row in _marked(node.value)]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            own = [row for decorator in node.decorator_list for row in _marked(decorator)]
            yield node.name, own or of_file


def _marked(code: ast.AST) -> Iterator[str]:
    """The rows of ``pytest.mark.field(...)`` in an expression."""
    for node in ast.walk(code):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.field":
            yield ast.literal_eval(node.args[0])


def _scenario(docstring: str) -> str:
    """The first sentence, without the names of the rows."""
    first = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=\.) ", _ROWS.sub("", first, count=1))[0]


def run(folder: Path, options: Sequence[str] = ()) -> tuple[int, dict[str, Counter[str]]]:
    """Run the tests of ``folder`` in a process of their own.

    Args:
        folder: Where they are.
        options: Further arguments of pytest.

    Returns:
        The exit status of pytest, and by row how many cases passed, failed and were skipped.
    """
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", str(folder), "-q", "-m", ""]
        command += [f"--junitxml={report}"]
        command += ["-p", Path(__file__).stem, *options]
        # What pytest says goes to stderr, so that the table can be piped.
        done = subprocess.run(
            command, cwd=folder.parents[1], env=environment(), stdout=2, check=False
        )
        return done.returncode, outcomes(report) if report.exists() else {}


def environment() -> dict[str, str]:
    """Of a pytest that has this as a plugin."""
    here = str(Path(__file__).resolve().parent)
    paths = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": paths}


def outcomes(report: Path) -> dict[str, Counter[str]]:
    """By row, how many cases of a JUnit report passed, failed and were skipped."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for case in ElementTree.parse(report).iter("testcase"):
        row = row_of_case(case)
        kinds = [_OUTCOMES[child.tag] for child in case if child.tag in _OUTCOMES]
        if row is not None:
            counts[row][min(kinds, default="passed")] += 1
    return dict(counts)


def row_of_case(case: ElementTree.Element) -> str | None:
    """That of a test in a report."""
    properties = {one.get("name"): one.get("value") for one in case.iter("property")}
    return properties.get("field")


def format_table(rows: Sequence[Row], results: Mapping[str, Counter[str]] | None = None) -> str:
    """Rows as text, with their results if there are any."""
    lines = [("row", "scenario", "tests", "" if results is None else "result")]
    for row in rows:
        result = "" if results is None else _said(results.get(row.name, Counter()))
        first, *others = textwrap.wrap(row.scenario, _SCENARIO_WIDTH) or [""]
        lines.append((row.name, first, str(row.num_tests), result))
        lines += [("", more, "", "") for more in others]
    return "\n".join(
        f"{name:3}  {scenario:{_SCENARIO_WIDTH}}  {tests:>5}  {result}".rstrip()
        for name, scenario, tests, result in lines
    )


def _said(counts: Counter[str]) -> str:
    said = [f"{counts[kind]} {kind}" for kind in ("failed", "passed", "skipped") if counts[kind]]
    return ", ".join(said) or "not run"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What was said on the command line."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python tools/field_table.py", description=summary)
    parser.add_argument("--list", action="store_true", help="do not run the tests")
    parser.add_argument("pytest_options", nargs="*", help="passed on to pytest; put -- before them")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """List or run the tests, and write the table; the exit status, 0 if no test failed."""
    options = parsed(arguments)
    rows = find_rows(FOLDER)
    if options.list:
        sys.stdout.write(format_table(rows) + "\n")
        return 0
    if importlib.util.find_spec("pytest") is None:
        sys.stderr.write("there is no pytest here; pip install 'pp_offload[test]', or use --list\n")
        return 2
    status, results = run(FOLDER, options.pytest_options)
    sys.stdout.write(format_table(rows, results) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
