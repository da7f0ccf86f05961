"""The script that tries other versions of torch runs all tests that are marked for it."""

from __future__ import annotations

from pathlib import Path

import with_torch


def test_the_smoke_suite_is_in_these_files() -> None:
    """Others are not collected, for some need at import what an old torch has not."""
    tests = Path(__file__).parent
    marked = {
        path.relative_to(tests.parent).as_posix()
        for path in tests.rglob("test_*.py")
        if "pytest.mark." + "smoke" in path.read_text()
    }
    assert marked == set(with_torch.SMOKE)
