"""Plant one fault after another, run core tests with each, and say which test caught it.

    python tools/planted -j 2
    python tools/planted --list
    python tools/planted --only "h2d ignores d2h"

It ends with status 1 if a fault is caught by no test, or does not apply.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from planted.edits import EDITS  # noqa: E402
from planted.seam import SEAM  # noqa: E402

FAULTS = {**SEAM, **EDITS}

HANG_S = 600
"""No run takes a tenth of it; a test that hangs has seen the fault."""

FAILED = 1
"""What pytest returns if tests ran and some failed."""


class Verdict(NamedTuple):
    """What became of a fault."""

    name: str
    is_caught: bool
    text: str
    seconds: float

    def __str__(self) -> str:
        outcome = "caught" if self.is_caught else "NOT CAUGHT"
        return f"{self.name:<34}  {outcome:<10}  {self.seconds:5.1f} s  {self.text}"


def run(name: str | None, tests: tuple[str, ...]) -> tuple[int, str]:
    """Status and output of core tests with a fault, or without."""
    command = [sys.executable, "-m", "pytest", "-m", "core", "-x", "-q", "--tb=line", "-rfE"]
    command += ["-p", "no:cacheprovider", *(["-p", "planted.plugin"] if name else []), *tests]
    paths = [str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PLANTED": name or "", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG_S
        )
    except subprocess.TimeoutExpired:
        return FAILED, "FAILED a test that hangs"
    return done.returncode, done.stdout + done.stderr


def judge(name: str, tests: tuple[str, ...] | None = None) -> Verdict:
    """Whether a fault is caught, and by which test."""
    start = time.perf_counter()
    status, output = run(name, tests or FAULTS[name].tests)
    failure = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, flags=re.MULTILINE)
    is_caught = (status == FAILED and failure is not None) or status < 0  # a crash
    if is_caught:
        text = failure[1] if failure else f"a crash by signal {-status}"
    elif status == 0:
        text = FAULTS[name].why
    else:
        text = f"status {status}: {output.strip()[-300:]}"
    return Verdict(name, is_caught, text, time.perf_counter() - start)


def main() -> int:
    """What the command does."""
    parser = argparse.ArgumentParser(prog="python tools/planted")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument("--only", action="append", metavar="NAME", help="some, by their names")
    parser.add_argument("--all", action="store_true", help="run all core tests with each")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="faults side by side")
    options = parser.parse_args()
    names = options.only or list(FAULTS)
    if unknown := set(names) - set(FAULTS):
        parser.error(f"no fault is named {sorted(unknown)}; see --list")
    if options.list:
        print("\n".join(f"{name}: {FAULTS[name].why}" for name in names))
        return 0
    every = ("tests/core",) if options.all else None
    tests = tuple(dict.fromkeys(test for name in names for test in every or FAULTS[name].tests))
    status, output = run(None, tests)
    if status:  # then a test that fails says nothing of a fault
        print(f"without a fault: status {status}\n{output[-2000:]}")
        return 1
    with ThreadPoolExecutor(options.jobs) as pool:
        verdicts = []
        for verdict in pool.map(lambda name: judge(name, every), names):
            print(verdict, flush=True)
            verdicts.append(verdict)
    print(f"{sum(v.is_caught for v in verdicts)} of {len(verdicts)} caught")
    return 0 if all(v.is_caught for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
