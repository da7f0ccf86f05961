"""Recordings: short, of equal ranks once; and their profile, as a hand counts it."""

from __future__ import annotations

import importlib
from unittest.mock import patch

import pytest
import torch
from helpers.virtual_training import KIND, chain
from torch import Tensor, nn

from pp_offload import OffloadConfig
from pp_offload.plan import profile, profile_table, record
from pp_offload.simulate import DEVICES
from pp_offload.simulate.schedules import order_of

H100 = DEVICES["H100"]


@pytest.mark.parametrize(
    ("schedule", "per_rank", "expected"),
    [("1f1b", 1, 8), ("interleaved1f1b", 2, 8), ("gpipe", 1, 32)],
)
def test_a_short_step_holds_as_many_microbatches(
    schedule: str, per_rank: int, expected: int
) -> None:
    """Of GPipe all are held, so none may be left out."""
    order = order_of(schedule, num_ranks=4, stages_per_rank=per_rank, num_microbatches=32)
    assert order.shortened().num_microbatches == expected


def test_equal_ranks_are_recorded_once() -> None:
    module = importlib.import_module("pp_offload.plan.record")
    example = torch.empty(16, 64, **KIND)
    work = chain(5, lambda: [nn.Linear(64, 64, **KIND), nn.GELU()], example, layers="*")
    order = order_of("1f1b", num_ranks=5, stages_per_rank=1, num_microbatches=5)
    tapes = record(order, work, H100)
    tapes_of = module._Recording.tapes
    with patch.object(module._Recording, "tapes", autospec=True, side_effect=tapes_of) as spy:
        others = [rank.recomputing(1) for rank in tapes]
    assert [recording._runs[0][0] for (recording, _), _ in spy.call_args_list] == [0, 1, 4]
    assert [list(rank.stages) for rank in others] == [[0], [1], [2], [3], [4]]
    assert others[2].recomputed == others[1].recomputed == (("0",),)


WIDTH, LENGTH = 4096, 8192


class Mlp(nn.Module):
    """Of four widths, with its norm."""

    def __init__(self) -> None:
        super().__init__()
        up, down = nn.Linear(WIDTH, 4 * WIDTH, **KIND), nn.Linear(4 * WIDTH, WIDTH, **KIND)
        self.part = nn.Sequential(nn.LayerNorm(WIDTH, **KIND), up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(x)


def test_a_profile_is_what_a_hand_counts() -> None:
    """Groups save 20 bytes of a token and unit of the width; a recomputed layer keeps its input."""
    example, groups = torch.empty(LENGTH, WIDTH, **KIND), {"mlp": "*.part"}
    work = chain(2, lambda: [Mlp() for _ in range(3)], example, groups=groups, layers="*")
    order = order_of("1f1b", num_ranks=2, stages_per_rank=1, num_microbatches=2)
    tapes = record(order, work, H100, OffloadConfig(rematerialize="none"))
    text = profile_table(profile(tapes, H100))
    rows = text.splitlines()
    assert rows[3].split() == "mlp 0-1 4 640.0 3.95 8.28 13.46 161.9".split()
    assert "The link carries 47.7" in text
    stages = rows[next(i for i, row in enumerate(rows) if row.startswith("stage")) :]
    assert stages[2].split() == "0 0 1.00 1.88 1.94 0.38 12.08 24.74 2.10 0.56".split()
