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


def run_pipeline(world: int, args: list[str], out: Path) -> list[dict[str, Any]]:
    """Run the worker on ``world`` processes; what each rank wrote."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), *args, str(out)],
            env=os.environ
            | {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "PYTHONPATH": os.pathsep.join([str(WORKER.parents[1]), *sys.path]),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in ranks]
    assert all(process.returncode == 0 for process in ranks), "\n".join(outputs)
    return [pickle.loads((out / f"{rank}.pkl").read_bytes()) for rank in range(world)]


@pytest.mark.parametrize(
    ("world", "schedule", "virtual"),
    [
        (2, "gpipe", 1),
        (2, "1f1b", 1),
        (2, "interleaved1f1b", 2),
        (4, "1f1b", 1),
        (4, "interleaved1f1b", 2),
    ],
)
def test_pipeline_is_equal_bit_for_bit(
    world: int, schedule: str, virtual: int, tmp_path: Path
) -> None:
    ranks = run_pipeline(world, [schedule, str(virtual), "8"], tmp_path)
    for facts in ranks:
        assert facts["equal"] and facts["tensors"] > 0
        assert facts["offloaded"] > 0
        assert facts["in_use"] == [0, 0, 0]
        assert facts["live"] == [0, 0, 0]
        assert "mlp" in facts["table"]
        assert facts["on_demand"][2] == facts["on_demand"][1], "steady state reloads on demand"
