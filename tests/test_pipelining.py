"""Real gloo pipelines under ``attach``: same bits, prefetch from the first step, nothing left."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("pipeline_worker.py")


ROOT = WORKER.parents[1]
PATHS = [str(ROOT), str(ROOT / "examples")]
"""Where workers find this package, and the table of schedules."""


def run_ranks(
    world: int, cases: list[str], out: Path, worker: Path = WORKER
) -> list[dict[str, dict[str, Any]]]:
    """Run the worker on ``world`` processes; what each rank found, by case."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker), str(out), *cases],
            env=os.environ
            | {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "PYTHONPATH": os.pathsep.join([*PATHS, *sys.path]),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in ranks]
    assert all(process.returncode == 0 for process in ranks), "\n".join(outputs)
    return [pickle.loads((out / f"{rank}.pkl").read_bytes()) for rank in range(world)]


ONE_STAGE = [("gpipe", 1), ("1f1b", 1)]
SEVERAL = [
    (name, virtual)
    for name in ("interleaved1f1b", "loopedbfs", "interleavedzerobubble")
    for virtual in (1, 2, 3)
]
V_SHAPED = [("zbv", 2), ("dualpipev", 2)]
ALL = [*ONE_STAGE, *SEVERAL, *V_SHAPED, ("csv", 2)]


@pytest.mark.parametrize("world", [2, 4])
def test_every_schedule_is_equal_bit_for_bit(world: int, tmp_path: Path) -> None:
    cases = [
        f"{name}:{virtual}:{scale}:{policy}"
        for name, virtual in ALL
        for scale, policy in ((True, "reload"), (False, "keep"))
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
