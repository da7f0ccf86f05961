"""FSDP2 and DTensor on real ranks: same bits, and no byte of a gathered parameter leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.ranks import WORKERS, run_ranks

WORKER = WORKERS / "fsdp_worker.py"

CASES = {
    2: [
        "alone:plain:mlp",
        "alone:kept:mlp",
        "alone:bf16:all",
        "pipeline:plain:interleaved1f1b",
        "tensor_parallel",
        "async_result",
    ],
    4: ["pipeline:bf16:1f1b"],
}
"""By number of ranks. In ``all``, a group has modules in it that are sharded on their own."""


@pytest.mark.quick(2)
@pytest.mark.parametrize("world", CASES)
def test_sharded_models_are_equal_bit_for_bit(world: int, tmp_path: Path) -> None:
    cases = CASES[world]
    for rank, results in enumerate(run_ranks(world, cases, tmp_path, WORKER)):
        assert list(results) == cases
        for case, facts in results.items():
            where = f"{case}, rank {rank} of {world}"
            assert facts["equal"] == [True, True], where
            assert all(nbytes > 0 for nbytes in facts["offloaded"]), where
            assert facts["live"] == [0, 0], where
            assert all(num > 0 for num in facts["num_left"]), where
            assert facts["num_whole_left"] == [0, 0], where
            if case.split(":")[0] in ("alone", "pipeline"):
                assert all(num > 0 for num in facts["whole"]), where
