"""Each row of failures in the field keeps a test, which has its number as a mark."""

from __future__ import annotations

import re
from pathlib import Path

ROWS = {f"F{number:02}" for number in (*range(1, 67), 68, 69)}
"""Those that have tests."""


def test_every_row_has_a_test() -> None:
    marks = [
        mark
        for path in Path(__file__).parents[1].rglob("test_*.py")
        for mark in re.findall(r'^@pytest\.mark\.field\("(F\d\d)"\)$', path.read_text(), re.M)
    ]
    assert set(marks) == ROWS
