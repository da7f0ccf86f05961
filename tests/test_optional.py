"""With torch, numpy and pytest alone, tests for a GPU are collected, and checksums are there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers.optional import OPTIONAL

ROOT = Path(__file__).parents[1]

WITHOUT = f"""
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in {sorted(OPTIONAL)}:
            return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""
"""Has Python find none of what is optional."""


def run(code: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_package_is_imported_without_what_is_optional() -> None:
    process = run(
        "import pp_offload.plan, pp_offload.simulate, pp_offload.testing, pp_offload.trace"
    )
    assert process.returncode == 0, process.stderr


def test_another_checksum_serves_without_xxhash() -> None:
    code = "from pp_offload._memory import checksum as c; import numpy, zlib\n"
    code += "assert c.checksum(numpy.arange(9)) == zlib.crc32(numpy.arange(9).data)\n"
    process = run(code)
    assert process.returncode == 0, process.stderr


def test_a_file_alone_is_collected_without_what_is_optional() -> None:
    """By itself: what other files have imported does not hide what it needs."""
    path = "core/test_order.py"
    process = run(f"import pytest; sys.exit(pytest.main(['--co', '-rs', 'tests/{path}']))")
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    assert f"{path}::test_" in process.stdout
