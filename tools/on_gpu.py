"""All that only a GPU can tell, in one command of seven minutes, on a machine without an index.

    PYTHONPATH=. CUBLAS_WORKSPACE_CONFIG=:4096:8 python tools/on_gpu.py --out results

Each part has a time limit of its own, and what it printed until then is kept: rows of steps as they
come, in ``DIR/rows.jsonl``, and the output of each part in ``DIR/<part>.log``. A part that fails or
is cut off does not end the others. The last lines say what became of each; the status is 1 if one
failed, and 0 where some were only cut off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
STEPS = [str(ROOT / "benchmarks/on_card.py")]
LIMITS = ["default", "limit-0.85", "limit-0.7", "limit-0.7-copied", "limit-0.55"]
LEAVING = ["ours", "ours-copied", "ours-0.5"]
PEERS = ["recompute", "activations", "save_on_cpu", "trl", "torchtune"]


class Part(NamedTuple):
    """A command of this Python, and the seconds it has."""

    name: str
    command: list[str]
    most_s: int


def parts_for(device: str, out: Path, cases: list[str], most_s: int) -> list[Part]:
    """What is asked first is what is wanted most.

    Args:
        device: Type of the device.
        out: Where the rates of the device are written.
        cases: Of ``benchmarks/on_card.py``.
        most_s: Of each case with all that is ours.
    """
    how = ["--device", device, "--rounds", "4", "--warmup", "7"]
    tests = ["-m", "pytest", "-q", "-m", "gpu", "-n", "14", "--maxfail", "500"]
    doctor = ["-m", "pp_offload.cli", "doctor", "--json", "--measure", str(out / "hardware.json")]
    size = ["--measure-mib", "256" if device == "cuda" else "1"]
    return [
        Part("doctor", [*doctor, *size], 30),
        *[
            Part(case, [*STEPS, case, *how, "--ways", "recompute", *LIMITS, *LEAVING], most_s)
            for case in cases
        ],
        Part("tests", tests, 110),
        Part("peers", [*STEPS, cases[0], *how, "--ways", *PEERS], 60),
    ]


def run(part: Part, out: Path) -> str:
    """Run it, and say what became of it."""
    begin_s = time.perf_counter()
    command = [sys.executable, *part.command]
    print(f"== {part.name}: at most {part.most_s} s", flush=True)
    with (out / f"{part.name}.log").open("w") as log, (out / "rows.jsonl").open("a") as rows:
        process = subprocess.Popen(
            ["timeout", "-k", "5", str(part.most_s), *command],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            log.flush()
            if line.startswith('{"'):
                rows.write(line)
                rows.flush()
            print(line, end="", flush=True)
        status = process.wait()
    outcome = {0: "ended", 124: "cut off"}.get(status, f"failed with status {status}")
    return f"{outcome} after {time.perf_counter() - begin_s:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--device", default="cuda", help="cpu and emulated to try the command")
    parser.add_argument("--cases", nargs="+", default=["gpt4096", "llama8b"])
    parser.add_argument("--parts", nargs="+", help="these alone")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes = {
        part.name: run(part, options.out)
        for part in parts_for(options.device, options.out.resolve(), options.cases, most_s=110)
        if not options.parts or part.name in options.parts
    }
    (options.out / "outcomes.json").write_text(json.dumps(outcomes, indent=1) + "\n")
    print("\n".join(f"{name}: {outcome}" for name, outcome in outcomes.items()))
    return int(any(outcome.startswith("failed") for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
