"""The program of a rank that a test has started: the cases named to it, and what came of each.

    if __name__ == "__main__":
        run_cases(compare)

The first argument is the folder for ``RANK.pkl``, the others are the cases.
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

RANK = os.environ.get("RANK", "0")
"""As it was at the start: some libraries write it."""


def run_cases(compare: Callable[[str], Any], *, has_group: bool = True) -> NoReturn:
    """Compare the cases named, write what came of them, and :func:`leave`.

    Args:
        compare: One case.
        has_group: Whether it needs a process group; else it makes one itself.
    """
    out, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    if has_group:
        dist.init_process_group("gloo")
    found = {}
    for case in cases:
        print(case, flush=True)  # a sign of life
        found[case] = compare(case)
    Path(out, f"{RANK}.pkl").write_bytes(pickle.dumps(found))
    if has_group:
        dist.destroy_process_group()
    leave()


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
