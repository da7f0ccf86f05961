"""Recordings: short, of equal ranks once; and their profile, as a hand counts it."""

from __future__ import annotations

import importlib
from unittest.mock import patch

import pytest
import torch
from helpers.virtual_models import KIND, Stage, chain
from torch import nn

from pp_offload import OffloadConfig
from pp_offload.plan import Profile, profile, profile_table, record
from pp_offload.simulate import DEVICES, Modules
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


# Profiles

WIDTH, LENGTH, NUM_LAYERS = 4096, 8192, 3


@pytest.fixture(scope="module")
def of_gpt() -> Profile:
    """Of two stages on two ranks."""
    work = Modules(
        [Stage(WIDTH, NUM_LAYERS) for _ in range(2)],
        example=torch.empty(LENGTH, WIDTH, **KIND),
        loss_fn=lambda y: y.float().square().mean(),
        groups={"attn": "*.attn", "mlp": "*.mlp"},
        layers="*",
    )
    order = order_of("1f1b", num_ranks=2, stages_per_rank=1, num_microbatches=2)
    return profile(record(order, work, H100, OffloadConfig(rematerialize="none")), H100)


def test_a_group_saves_what_a_hand_counts(of_gpt: Profile) -> None:
    """Bytes of a token and unit of the width: 12 of attention, 20 of an MLP of four widths."""
    assert [each.nbytes / (WIDTH * LENGTH) for each in of_gpt.groups] == [12, 20] * 6


def test_the_tables(of_gpt: Profile) -> None:
    rows = profile_table(of_gpt).splitlines()
    assert rows[3].split() == "mlp 0-1 6 640.0 3.95 8.28 13.46 161.9".split()
    assert "The link carries 47.7" in profile_table(of_gpt)
    stages = rows[next(i for i, row in enumerate(rows) if row.startswith("stage")) :]
    assert stages[2].split() == "0 0 1.38 3.00 3.07 0.38 20.79 44.89 5.00 0.94".split()
