"""A command of ``pp-offload``.

code, output = run("plan", "helpers.cli_models:good", "--limit", "1GiB")
"""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest

from pp_offload.cli import main


def run(*arguments: object) -> tuple[int, str]:
    """The exit code, and what is printed; what has a traceback is raised."""
    out = StringIO()
    with redirect_stdout(out), redirect_stderr(out), pytest.raises(SystemExit) as done:
        main([str(argument) for argument in arguments])
    return int(done.value.code or 0), out.getvalue()


def good(*arguments: object) -> str:
    """What is printed by a command that has exit code 0."""
    code, output = run(*arguments)
    assert code == 0, output
    return output


def check_refused(command: str, problem: str) -> None:
    """The command is a usage error, and says what is wrong."""
    code, output = run(*command.split())
    assert code == 2 and "\nError: " in output, output
    assert problem in output, output
