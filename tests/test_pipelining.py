"""Real gloo pipelines under ``attach``: same bits, prefetch from the first step, nothing left."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import BEFORE_2_13
from helpers.ranks import run_ranks

LOOPED = ("interleaved1f1b", "loopedbfs", "interleavedzerobubble")
SCHEDULES = [
    *(("gpipe", 1), ("1f1b", 1)),
    *((name, virtual) for name in LOOPED for virtual in (1, 2, 3)),
    *([] if BEFORE_2_13 else [("zbv", 2), ("dualpipev", 2)]),  # which is torch's, over gloo
    ("csv", 2),
]
"""Each with how many stages a rank has."""


@pytest.mark.field("F22")
@pytest.mark.smoke
@pytest.mark.quick(2)
@pytest.mark.parametrize("world", [2, 4])
def test_every_schedule_is_equal_bit_for_bit(world: int, tmp_path: Path) -> None:
    cases = [
        f"stage/plain/{name}/{virtual}/{('reload', 'keep')[(number + world // 2) % 2]}"
        for number, (name, virtual) in enumerate(SCHEDULES)
    ]
    for rank, results in enumerate(run_ranks(world, cases, tmp_path)):
        assert list(results) == cases
        for case, facts in results.items():
            where = f"{case}, rank {rank} of {world}"
            assert facts["equal"] == [True, True] and min(facts["offloaded"]) > 0, where
            assert all("mlp" in table for table in facts["table"]), where
            for steps in facts["steps"]:
                assert not any(step.host_bytes_in_use or step.live_tensors for step in steps), where
                assert steps[2].on_demand_reloads == steps[1].on_demand_reloads, where
