"""Real gloo pipelines under ``attach``: same bits, prefetch from the first step, nothing left."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import BEFORE_2_13
from helpers.ranks import run_ranks
from helpers.schedules import ALL, V_SHAPED

SCHEDULES = [each for each in ALL if not (BEFORE_2_13 and each in V_SHAPED)]
"""Older versions of torch cannot run the others over gloo, without offload either."""


@pytest.mark.field("F22")
@pytest.mark.smoke
@pytest.mark.quick(2)
@pytest.mark.parametrize("world", [2, 4])
def test_every_schedule_is_equal_bit_for_bit(world: int, tmp_path: Path) -> None:
    options = (True, "reload"), (False, "keep")
    cases = [
        f"{name}:{virtual}:{scale}:{policy}"
        for number, (name, virtual) in enumerate(SCHEDULES)
        for scale, policy in [options[(number + world // 2) % 2]]  # the other one on more ranks
    ]
    for rank, results in enumerate(run_ranks(world, cases, tmp_path)):
        assert list(results) == cases
        for case, facts in results.items():
            where = f"{case}, rank {rank} of {world}"
            steps = facts["steps"]
            assert facts["equal"] and steps[-1].bytes_offloaded > 0, where
            assert not any(step.host_bytes_in_use or step.live_tensors for step in steps), where
            assert "mlp" in facts["table"], where
            assert steps[2].on_demand_reloads == steps[1].on_demand_reloads, where
