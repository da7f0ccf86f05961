"""The command line as a new user types it: help, versions, and what is refused before torch."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.cli import check_refused, good

from pp_offload import OffloadConfig, __version__
from pp_offload.cli.arguments import ARGUMENTS, COMMANDS
from pp_offload.simulate import DEVICES
from pp_offload.simulate.schedules import SCHEDULES

ROOT = Path(__file__).parents[2]

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None
from pp_offload.cli import main
main(sys.argv[1:])
"""


def run_python(*arguments: str) -> str:
    """What a new process prints, which has exit code 0 and no error."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_versions_are_those_of_a_bug_report() -> None:
    version = f"torch {torch.__version__}, Python {platform.python_version()}"
    assert good("--version") == f"pp_offload {__version__}, {version}\n"


@pytest.mark.parametrize("typed", ["--help", "--version", "plan -h"])
def test_help_and_version_take_no_torch(typed: str) -> None:
    """Its import takes seconds."""
    assert run_python("-c", WITHOUT_TORCH, *typed.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_names_its_options(name: str) -> None:
    output = " ".join(good(name, "--help").split())
    assert output.startswith(f"usage: pp-offload {name} [OPTIONS]")
    assert all(text.split()[0] in output for text in COMMANDS[name].arguments if text[0] == "-")


def test_help_names_all_devices_and_schedules() -> None:
    output = " ".join(good("simulate", "-h").split())
    assert f"{', '.join(DEVICES)}, or a file" in output
    assert f"{', '.join(SCHEDULES)}, or a CSV" in output
    assert ARGUMENTS["--min-numel"]["default"] == OffloadConfig().min_offloaded_tensor_size


WRONG = {
    "simulat": "invalid choice: 'simulat' (choose from ",
    "plan x:y": "the following arguments are required: --limit",
    "plan x:y --limi 1": "the following arguments are required: --limit",
    "trace": "the following arguments are required: FILE...",
    "simulate x:y --ranks 0": "Invalid value for --ranks/--pp: found 0, expected an integer of at",
    "simulate x:y --ranks 1.5": "found 1.5, expected an integer of at least 1",
    "simulate x:y --fraction 2": "found 2, expected a finite number of at least 0 and at most 1",
    "simulate x:y --gib nan": "Invalid value for --gib: found nan, expected a finite number",
    "plan x:y --limit 1GiB --host-gib inf": "found inf, expected a finite number of at least 0",
    "simulate x:y --network-gb 0": "found 0, expected a finite number of at least 0.001",
    "sweep x:y --limits 1": "found 1, expected an integer of at least 2",
}


@pytest.mark.parametrize("command", WRONG)
def test_what_cannot_be_right_is_refused(command: str) -> None:
    check_refused(command, WRONG[command])
