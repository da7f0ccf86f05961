"""Importing the package costs next to nothing, and nothing that is imported later is heavy.

Modules are counted, for times depend on who else uses the machine.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import tomllib
from helpers.optional import OPTIONAL
from helpers.processes import run
from helpers.quick import chosen, tuples

import pp_offload

ROOT = Path(pp_offload.__file__).parents[1]


def modules_of(code: str, *, behind: str = "") -> set[str]:
    """What a new process imports for this code, when it has run another before."""
    code = f"""
import json, sys
{behind}
before = set(sys.modules)
{code}
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    return set(json.loads(done.stdout))


def test_the_package_alone_imports_no_other_module_of_it() -> None:
    loaded = modules_of("import pp_offload")
    assert {module for module in loaded if module.split(".")[0] == "pp_offload"} == {"pp_offload"}
    assert "torch" not in loaded


def test_all_its_names_import_nothing_that_is_heavy() -> None:
    """Beside what ``import torch`` does. Pipelining of PyTorch alone would take a tenth of that."""
    names = "import pp_offload\nfor name in pp_offload.__all__: getattr(pp_offload, name)"
    names += "\nimport pp_offload.integrations.accelerate"
    loaded = modules_of(names, behind="import torch, decimal, numpy.typing, statistics")
    others = {module for module in loaded if module.split(".")[0] != "pp_offload"}
    assert others <= {  # no compiler of PyTorch among them
        "fractions",
        "torch.distributed.algorithms._checkpoint",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    }
    unwanted = ("cli", "plan", "simulate", "testing", "trace")
    assert not {m for m in loaded if m.startswith(tuple(f"pp_offload.{n}" for n in unwanted))}


def test_type_checkers_have_the_same_names() -> None:
    """Where a module is imported whole, its ``__all__`` counts; of errors, the classes."""
    typed: dict[str, str] = {}
    for node in ast.walk(ast.parse(Path(pp_offload.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pp_offload."):
            module = importlib.import_module(node.module or "")
            classes = [name for name, value in vars(module).items() if isinstance(value, type)]
            whole = getattr(module, "__all__", classes)
            names = [alias.name for alias in node.names]
            for name in whole if names == ["*"] else names:
                typed[name] = (node.module or "").removeprefix("pp_offload.")
    typed = typed | {"pipelining": ""}
    assert typed == pp_offload._MODULES
    assert list(pp_offload.__all__) == sorted(typed)


def test_every_name_is_there_and_listed() -> None:
    assert set(pp_offload.__all__) <= set(dir(pp_offload))
    for name in pp_offload.__all__:
        assert getattr(pp_offload, name) is vars(pp_offload)[name]
    names: dict[str, object] = {}
    exec("from pp_offload import *", names)
    assert set(pp_offload.__all__) <= set(names)


def test_names_that_other_libraries_have_are_here_as_their_page_says() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    heads = re.findall(r"^- (.*?):", page, flags=re.MULTILINE)
    names = {name for head in heads for name in re.findall("`(.+?)`", head)}
    assert len(names) > 20 and names <= set(pp_offload.__all__)


def test_versions_agree() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        version = tomllib.load(file)["project"]["version"]
    assert pp_offload.__version__ == version
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"\n## [{version}] - " in changes
    assert changes.index("\n## [Unreleased]") < changes.index(f"\n## [{version}]")
    cited = (ROOT / "CITATION.cff").read_text()
    assert f'\nversion: "{version}"\n' in cited


# Which tests are collected with torch, numpy and pytest alone, and which are quick


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
