"""Scripts, in a process of their own or in this one; a name alone is that of an example."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from helpers.processes import Run, run

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def environment() -> dict[str, str]:
    """With this checkout's package, and no launcher's variables."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in launcher}
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))}


def run_command(command: list[str]) -> Run:
    """A process, whose ranks end with it."""
    with TemporaryDirectory() as folder:
        return run(command, Path(folder), environment())


def run_example(script: str | Path, *flags: object, launcher: tuple[str, ...] = ()) -> Run:
    """A run of a script that ends well."""
    done = run_command([sys.executable, *launcher, str(EXAMPLES / script), *map(str, flags)])
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def train(out: Path, *flags: str, launcher: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
    """The figures and the output of a short training of a GPT."""
    small = "--steps 4 --microbatches 4 --layers 4 --width 32 --context 32 --min-numel 1".split()
    done = run_example("train_gpt.py", *small, *flags, "--json", out, launcher=launcher)
    return json.loads(out.read_text()), done.stdout


def run_here(script: str | Path, *flags: str) -> Any:
    """The status of a script that runs in this process, but for ranks that it starts itself."""
    path = EXAMPLES / script
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        patch.setattr(os, "environ", environment())
        patch.setattr(sys, "argv", [str(path), *flags])
        return importlib.import_module(path.stem).main()
