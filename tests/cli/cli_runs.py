"""A command of ``pp-offload``, run as in the directory of ``cli_models.py``.

code, output = run("plan", "cli_models:good", "--limit", "1GiB")
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pp_offload.cli.app import app


def run(*arguments: str) -> tuple[int, str]:
    """The exit code, and what is printed on one line; what has a traceback is raised."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parent)  # so that the module is found without PYTHONPATH
        done = CliRunner().invoke(app, [*arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, " ".join(done.output.split())
