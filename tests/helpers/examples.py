"""Examples, each in a process of its own."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from helpers.processes import Run, run

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

SMALL = "--steps 4 --microbatches 4 --layers 4 --width 32 --context 32 --min-numel 1".split()


def run_command(command: list[str]) -> Run:
    """With this checkout's package, and no launcher's variables; the ranks end with it."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in launcher}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    with TemporaryDirectory() as folder:
        return run(command, Path(folder), env)


def run_example(script: str, *flags: object, launcher: tuple[str, ...] = ()) -> Run:
    """A run of an example that ends well."""
    done = run_command([sys.executable, *launcher, str(EXAMPLES / script), *map(str, flags)])
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def train(out: Path, *flags: str, launcher: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
    """The figures and the output of a short run."""
    done = run_example("train_gpt.py", *SMALL, *flags, "--json", out, launcher=launcher)
    return json.loads(out.read_text()), done.stdout


def run_here(script: str, *flags: object) -> int:
    """The status of an example that runs in this process: another imports for some seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        patch.setattr(sys, "argv", [script, *map(str, flags)])
        code: int = importlib.import_module(Path(script).stem).main()
    return code


def outcomes(script: str, lines: Iterable[str]) -> dict[str, tuple[Any, str]]:
    """Status and errors of an example with each line of flags."""
    command = [sys.executable, "-c", ONE_AFTER_ANOTHER, str(EXAMPLES / script), *lines]
    done = run_command(command)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


ONE_AFTER_ANOTHER = """
import json, os, runpy, sys
from contextlib import redirect_stderr
from io import StringIO

script, *lines = sys.argv[1:]
sys.path.insert(0, os.path.dirname(script))
outcomes = {}
for line in lines:
    sys.argv = [script, *line.split()]
    code, errors = 0, StringIO()
    with redirect_stderr(errors):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as exit:
            code = exit.code
    outcomes[line] = code, errors.getvalue()
print(json.dumps(outcomes))
"""
"""Runs a script with each line of flags; prints their statuses, and what each writes to stderr."""
