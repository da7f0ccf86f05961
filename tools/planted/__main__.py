"""Plant one fault after another, run core tests with each, and print which test caught it.

    python tools/planted -j 2
    python tools/planted --list
    python tools/planted --only "h2d ignores d2h"

The exit status is 1 if a fault is caught by no test, or does not apply.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from planted.faults import FAULTS  # noqa: E402

HANG_S = 600
"""No run takes a tenth of it; a test that hangs has seen the fault."""


def run(name: str, tests: list[str]) -> tuple[int, str]:
    """Status and output of core tests with a fault; without one if the name is empty."""
    command = [sys.executable, "-m", "pytest", "-m", "core", "-x", "-q", "--tb=line", "-rfE"]
    command += ["-p", "no:cacheprovider", *(["-p", "planted.plugin"] if name else []), *tests]
    paths = [str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PLANTED": name, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG_S
        )
    except subprocess.TimeoutExpired:
        return 1, "FAILED a test that hangs"
    return done.returncode, done.stdout + done.stderr


def judge(name: str) -> bool:
    """Print whether a fault is caught, and by which test."""
    status, output = run(name, [FAULTS[name].tests])
    failure = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, flags=re.MULTILINE)
    is_caught = (status == 1 and failure is not None) or status < 0  # a crash
    text = failure[1] if failure else f"status {status}: {output.strip()[-300:]}"
    print(f"{name:<56}  {'caught' if is_caught else 'NOT CAUGHT'}  {text}", flush=True)
    return is_caught


def main() -> int:
    """Plant the chosen faults."""
    parser = argparse.ArgumentParser(prog="python tools/planted")
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    parser.add_argument("--only", action="append", choices=list(FAULTS), help="some, by name")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="faults side by side")
    options = parser.parse_args()
    names = options.only or list(FAULTS)
    if options.list:
        print("\n".join(names))
        return 0
    status, output = run("", sorted({FAULTS[name].tests for name in names} - {"tests/core"}))
    if status:  # a test that fails anyway proves nothing about a fault
        print(f"without a fault: status {status}\n{output[-2000:]}")
        return 1
    with ThreadPoolExecutor(options.jobs) as pool:
        verdicts = list(pool.map(judge, names))
    print(f"{sum(verdicts)} of {len(verdicts)} caught")
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
