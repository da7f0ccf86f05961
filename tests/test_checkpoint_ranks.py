"""Checkpoints with offload, and whole stages in a context, on real ranks: same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.ranks import WORKERS, run_ranks

WORKER = WORKERS / "checkpoint_worker.py"
WAYS = ("full, offload", "all, offload")
CASES = [
    *(f"fsdp1:{way}" for way in WAYS),
    *(f"pipeline:{way}:{name}" for way in WAYS for name in ("1f1b", "interleaved1f1b")),
    "pipeline:full, offload:interleavedzerobubble",
    *(f"pipeline:context:{name}" for name in ("gpipe", "1f1b", "interleavedzerobubble")),
]


@pytest.mark.parametrize("cases", [CASES[::3], pytest.param(CASES, marks=pytest.mark.slow)])
def test_checkpointed_models_are_equal_bit_for_bit(cases: list[str], tmp_path: Path) -> None:
    for rank, results in enumerate(run_ranks(2, cases, tmp_path, WORKER)):
        assert list(results) == cases
        for case, facts in results.items():
            where = f"{case}, rank {rank}: {facts}"
            assert facts["equal"] == [True, True], where
            assert all(nbytes > 0 for nbytes in facts["offloaded"]), where
