"""Random programs, with and without offload, must agree bit for bit.

python tools/fuzzer.py --programs 8000 --seed 77
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What was said on the command line."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python tools/fuzzer.py", description=summary)
    parser.add_argument("--programs", type=positive, default=20000, help="how many (20000)")
    parser.add_argument("--seed", type=int, default=0, help="what they are drawn from (0)")
    parser.add_argument("--jobs", type=positive, default=1, help="processes (1)")
    parser.add_argument("--backend", choices=["cuda"], help="run all on this; drawn by default")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """A number of at least one, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} found, expected at least 1")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the programs; prints the smallest that fails, if one does, and then gives 1."""
    options = parsed(arguments)
    # In front, and in the environment of no process but those that are spawned from this one.
    sys.path.insert(0, str(TESTS))
    campaign = importlib.import_module("helpers.fuzz.campaign")
    totals = campaign.long_run(options.seed, options.programs, options.jobs, options.backend, tell)
    for failure in totals.failures:
        sys.stdout.write("\n" + failure.script())
    return 1 if totals.failures else 0


def tell(text: str) -> None:
    """Write ``text`` at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
