"""Ranks that a test starts: they are given cases, and each writes what came of them.

One process imports what the ranks need, and forks them. Its program ends with

    if __name__ == "__main__":
        run_cases(compare)

The first arguments are the folder for ``RANK.pkl`` and the number of ranks, the others the cases.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from helpers.processes import ROOT, start, watch

PATHS = [str(ROOT), str(ROOT / "examples")]
"""Where workers find this package, and the table of schedules."""

WORKERS = Path(__file__).with_name("workers")


def run_ranks(
    world: int, cases: list[str], out: Path, worker: Path = WORKERS / "parallel_worker.py"
) -> list[dict[str, dict[str, Any]]]:
    """Run the worker on ``world`` ranks; what each of them found, by case."""
    # The ranks meet at a store of this process: a port that was free may be taken by the time that
    # a rank would listen on it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "PYTHONPATH": os.pathsep.join([*PATHS, *sys.path]),
    }
    log, errors = out / "log.txt", out / "errors.txt"
    command = [sys.executable, str(worker), str(out), str(world), *cases]
    process = start(command, {**os.environ, **shared}, log, errors)
    is_well = watch(process, log)  # each rank writes a line for each case
    assert is_well, f"no rank came to its next case:\n{errors.read_text()}"
    assert process.returncode == 0, errors.read_text()
    return [pickle.loads((out / f"{rank}.pkl").read_bytes()) for rank in range(world)]


def run_cases(compare: Callable[[str], Any]) -> NoReturn:
    """Compare the cases named on each rank, write what came of them, and :func:`leave`."""
    out, world, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    rank = fork(int(world))
    dist.init_process_group("gloo")
    results = {}
    for case in cases:
        print(case, flush=True)  # a sign of life
        results[case] = compare(case)
    Path(out, f"{rank}.pkl").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()
    leave()


def fork(world: int) -> int:
    """Return on each rank, which is a process of its own, with its number; wait here for all."""
    sys.stdout.flush()
    for rank in range(world):
        if os.fork() == 0:
            os.environ["RANK"] = str(rank)
            return rank
    for _ in range(world):
        if os.wait()[1] != 0:  # the others may wait for it for ever; the test ends them
            os._exit(1)
    os._exit(0)


def leave() -> NoReturn:
    """End this process, not its interpreter, as ranks must whose models FSDP2 has sharded.

    PyTorch's caches keep the group of such a model for ever, and so Gloo's threads. A thread drops
    the tensor of its last collective whenever it is given time; if the interpreter is ending by
    then, the process aborts: "terminate called without an active exception"
    (pytorch/pytorch#190489).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
