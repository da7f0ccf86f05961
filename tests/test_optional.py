"""Which tests are quick, and which are collected with torch, numpy and pytest alone."""

from __future__ import annotations

import os
import sys
from itertools import product
from pathlib import Path

import pytest
from helpers.optional import OPTIONAL
from helpers.processes import run
from helpers.quick import chosen, tuples

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


CODE = """
import numpy, pytest, zlib
import pp_offload.plan, pp_offload.simulate, pp_offload.testing, pp_offload.trace
from pp_offload._memory.addresses import checksum

assert checksum(numpy.arange(9)) == zlib.crc32(numpy.arange(9).data)
sys.exit(pytest.main(["--co", "-rs", "tests/core/test_order.py"]))
"""


def test_without_what_is_optional(tmp_path: Path) -> None:
    """The package is imported, another checksum serves, and a file alone is collected: what other
    files have imported does not hide what it needs.
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = run([sys.executable, "-c", WITHOUT + CODE], tmp_path, env, ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "core/test_order.py::test_" in done.stdout


@pytest.mark.parametrize("sizes", [(5, 4, 3), (3, 3), (7,), (2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_every_tuple_is_in_one_of_those_chosen(sizes: tuple[int, ...], size: int) -> None:
    every = [dict(zip("abcd", values, strict=False)) for values in product(*map(range, sizes))]
    indices = chosen(every, size)
    wanted = set().union(*(tuples(case, size) for case in every))
    assert set().union(*(tuples(every[index], size) for index in indices)) == wanted
    assert indices == chosen(every, size), "each worker chooses the same"
    assert size == 2 or len(indices) == max(sizes), "no more than needed"
