"""Real gloo pipelines under ``attach``: same bits, prefetch from the first step, nothing left."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from processes import start, watch

WORKER = Path(__file__).with_name("pipeline_worker.py")


ROOT = WORKER.parents[1]
PATHS = [str(ROOT), str(ROOT / "examples")]
"""Where workers find this package, and the table of schedules."""


def run_ranks(
    world: int, cases: list[str], out: Path, worker: Path = WORKER
) -> list[dict[str, dict[str, Any]]]:
    """Run the worker on ``world`` processes; what each rank found, by case."""
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
    logs = [out / f"{rank}.txt" for rank in range(world)]
    ranks = [
        start(
            [sys.executable, str(worker), str(out), *cases],
            {**os.environ, **shared, "RANK": str(rank)},
            log,
            log.with_suffix(".err"),
        )
        for rank, log in enumerate(logs)
    ]
    is_well = watch(ranks, logs)  # a worker writes a line for each case
    said = "\n".join(log.with_suffix(".err").read_text() for log in logs)
    assert is_well, f"no rank came to its next case:\n{said}"
    assert all(process.returncode == 0 for process in ranks), said
    return [pickle.loads((out / f"{rank}.pkl").read_bytes()) for rank in range(world)]


ONE_STAGE = [("gpipe", 1), ("1f1b", 1)]
SEVERAL = [
    (name, virtual)
    for name in ("interleaved1f1b", "loopedbfs", "interleavedzerobubble")
    for virtual in (1, 2, 3)
]
V_SHAPED = [("zbv", 2), ("dualpipev", 2)]
ALL = [*ONE_STAGE, *SEVERAL, *V_SHAPED, ("csv", 2)]


@pytest.mark.quick(2)
@pytest.mark.parametrize("world", [2, 4])
def test_every_schedule_is_equal_bit_for_bit(world: int, tmp_path: Path) -> None:
    options = (True, "reload"), (False, "keep")
    cases = [
        f"{name}:{virtual}:{scale}:{policy}"
        for number, (name, virtual) in enumerate(ALL)
        for scale, policy in [options[(number + world // 2) % 2]]  # the other one on more ranks
    ]
    for rank, found in enumerate(run_ranks(world, cases, tmp_path)):
        assert list(found) == cases
        for case, facts in found.items():
            where = f"{case}, rank {rank} of {world}"
            assert facts["equal"] and facts["tensors"] > 0, where
            assert facts["offloaded"] > 0, where
            assert facts["in_use"] == [0, 0, 0], where
            assert facts["live"] == [0, 0, 0], where
            assert "mlp" in facts["table"], where
            assert 0 < facts["unused"] <= facts["window"], where
            assert facts["on_demand"][2] == facts["on_demand"][1], where
