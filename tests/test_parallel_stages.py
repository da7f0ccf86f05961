"""Stages of a pipeline that are replicated, sharded, or checkpointed by operator: same bits.

On two ranks, replicas are of a pipeline of one rank, whose stages are all there; on four, of two.
Of sharded ones no byte of a gathered parameter leaves. DTensors and asynchronous collectives, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.ranks import WORKERS, run_ranks

WORKER = WORKERS / "parallel_stage_worker.py"
CASES = {
    2: [
        *("ddp:1f1b", "fsdp2:interleaved1f1b", "blocks:interleaved1f1b"),
        *("tensor_parallel", "async_result"),
    ],
    4: [
        *("ddp:1f1b", "fsdp2, kept:gpipe", "fsdp2, bf16:1f1b"),
        *("fsdp2:interleaved1f1b", "fsdp2, kept:interleavedzerobubble", "fsdp2, kept:zbv"),
    ],
}
"""By number of ranks. With DDP, other schedules fail in its reducer without offload, too."""


@pytest.mark.quick(2)
@pytest.mark.parametrize("world", CASES)
def test_every_stage_is_equal_bit_for_bit(world: int, tmp_path: Path) -> None:
    for rank, results in enumerate(run_ranks(world, CASES[world], tmp_path, WORKER)):
        assert list(results) == CASES[world]
        for case, facts in results.items():
            where = f"{case}, rank {rank} of {world}: {facts}"
            assert facts["equal"] == [True, True], where
            # Groups of checkpointed blocks are inside their regions, where the checkpoint decides.
            is_offloading = not case.startswith("blocks")
            assert [nbytes > 0 for nbytes in facts["offloaded"]] == [is_offloading] * 2, where
            assert facts["live"] == facts["num_whole_left"] == [0, 0], where
            assert all(num > 0 for num in facts["whole"]) is case.startswith("fsdp2"), where


def test_layers_that_exchange_activations_are_equal_bit_for_bit(tmp_path: Path) -> None:
    """Context parallel by all-to-all and in a ring, and expert parallel."""
    cases = ["ulysses", "ring", "experts"]
    for results in run_ranks(2, cases, tmp_path, WORKERS / "exchange_worker.py"):
        assert list(results) == cases
        for case, facts in results.items():
            assert len(facts) == 4 and set(facts.values()) == {(True, True, 0)}, (case, facts)
