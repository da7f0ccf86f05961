"""The command line as a new user types it: versions, help, and what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_example import run_command
from typer.testing import CliRunner

import pp_offload
from pp_offload.cli.app import app

WITHOUT = """
import sys
sys.modules[{missing!r}] = None
from pp_offload.cli import main
main(["--version"])
"""


def test_the_version_is_that_of_a_bug_report() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    assert done.output.startswith(f"pp_offload {pp_offload.__version__}, torch 2.")
    assert "Python 3." in done.output


COMMANDS = ("simulate", "profile", "plan", "sweep", "trace", "compare", "doctor")


def test_help_names_every_command() -> None:
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    assert all(f"  {name} " in done.output for name in COMMANDS)
    assert "..." not in done.output.split("Commands:")[1], "each is said in a line"


def test_as_a_module() -> None:
    done = run_command([sys.executable, "-m", "pp_offload.cli", "--version"])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("pp_offload ")


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_one_line_says_what_to_install(missing: str) -> None:
    done = run_command([sys.executable, "-c", WITHOUT.format(missing=missing)])
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "pip install typer rich" in line and "in a checkout of pp_offload: pip install" in line


def test_an_unknown_command_is_explained() -> None:
    done = CliRunner().invoke(app, ["simulat"])
    assert done.exit_code == 2 and "No such command 'simulat'" in done.output


def test_the_package_does_not_need_the_extras() -> None:
    code = "import sys, pp_offload, pp_offload.trace.picture, pp_offload.simulate\n"
    code += "print(sorted({'typer', 'rich', 'matplotlib'} & set(sys.modules)))"
    done = run_command([sys.executable, "-c", code])
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_command_is_installed() -> None:
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'pp-offload = "pp_offload.cli:main"' in pyproject
