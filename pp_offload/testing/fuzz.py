"""Random programs, with and without offload, must agree bit for bit.

The programs are in ``tests/fuzz`` of a checkout, not of an installed package.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2] / "tests"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``python -m pp_offload.testing fuzz`` understands."""
    parser.add_argument("--programs", type=positive, default=20000, help="how many (20000)")
    parser.add_argument("--seed", type=int, default=0, help="what they are drawn from (0)")
    parser.add_argument("--jobs", type=positive, default=1, help="processes (1)")


def positive(text: str) -> int:
    """A number of at least one, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} found, expected at least 1")
    return number


def main(options: argparse.Namespace) -> int:
    """Run the programs; prints the smallest that fails, if one does, and then gives 1."""
    if not (TESTS / "fuzz").is_dir():
        sys.stderr.write(
            f"no fuzzer in {TESTS / 'fuzz'}: it is part of a checkout, not of the installed "
            "package; clone the repository and install it with pip install -e '.[test]'\n"
        )
        return 2
    # In front, and in the environment of no process but those that are spawned from this one.
    sys.path[:0] = [str(TESTS), str(TESTS / "fuzz")]
    try:
        campaign = importlib.import_module("campaign")
    except ModuleNotFoundError as missing:
        sys.stderr.write(f"the fuzzer needs {missing.name}: pip install -e '.[test]'\n")
        return 2
    totals = campaign.long_run(options.seed, options.programs, options.jobs, tell)
    for failure in totals.failures:
        sys.stdout.write("\n" + failure.script())
    return 1 if totals.failures else 0


def tell(text: str) -> None:
    """Write ``text`` at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
