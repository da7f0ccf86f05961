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
    parser.add_argument("--programs", type=int, default=20000, help="how many (20000)")
    parser.add_argument("--seed", type=int, default=0, help="what they are drawn from (0)")
    parser.add_argument("--backend", choices=["cuda"], help="run all on this; drawn by default")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the programs; prints the smallest that fails, if one does, and then gives 1."""
    options = parsed(arguments)
    sys.path.insert(0, str(TESTS))
    run = importlib.import_module("helpers.fuzz.run")
    counts, failure = run.explore(options.seed, options.programs, options.backend)
    numbers = ", ".join(f"{num} {name}" for name, num in counts.items())
    sys.stdout.write(f"{numbers}; {'failure' if failure else 'no failure'}; seed {options.seed}\n")
    sys.stdout.write(f"\n{failure.script()}" if failure else "")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
