"""Loops of other libraries that replicate the model on two ranks, with offload: same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.ranks import run_ranks

pytest.importorskip("accelerate")
pytest.importorskip("lightning")

WORKER = Path(__file__).with_name("trainers_worker.py")
CASES = [
    f"{library}:{product}"
    for library in ("accelerate", "lightning")
    for product in ("activations", "groups")
]


def test_replicas_are_equal_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    ranks = run_ranks(2, CASES, tmp_path, WORKER)
    for rank, results in enumerate(ranks):
        assert list(results) == CASES
        for case, facts in results.items():
            assert facts["equal"] and facts["offloaded"] > 0, f"{case}, rank {rank}: {facts}"
    for case in CASES:
        assert ranks[0][case]["loss"] != ranks[1][case]["loss"], "each has its own data"
