"""What makes plans of large models quick: equal ranks are recorded once, and steps are short."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from helpers.virtual_models import KIND, chain
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from pp_offload.plan import record
from pp_offload.simulate import DEVICES, PipelineOrder


@pytest.mark.parametrize(
    ("schedule", "per_rank", "expected"),
    [(Schedule1F1B, 1, 8), (ScheduleInterleaved1F1B, 2, 8), (ScheduleGPipe, 1, 32)],
)
def test_a_short_step_holds_as_many_microbatches(
    schedule: type, per_rank: int, expected: int
) -> None:
    """Of GPipe all are held, so none may be left out."""
    sizes = {"num_ranks": 4, "num_stages": 4 * per_rank, "num_microbatches": 32}
    assert PipelineOrder(schedule, **sizes).shortened().num_microbatches == expected


def test_equal_ranks_are_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("pp_offload.plan.record")
    example = torch.empty(16, 64, **KIND)
    work = chain(5, lambda: [nn.Linear(64, 64, **KIND), nn.GELU()], example, layers="*")
    order = PipelineOrder(Schedule1F1B, num_ranks=5, num_stages=5, num_microbatches=5)
    tapes = record(order, work, DEVICES["H100"])
    recorded: list[int] = []
    tapes_of = module._Recording.tapes

    def noted(recording: Any, update: Any) -> Any:
        recorded.append(recording._runs[0][0])
        return tapes_of(recording, update)

    monkeypatch.setattr(module._Recording, "tapes", noted)
    others = [rank.recomputing(1) for rank in tapes]
    assert recorded == [0, 1, 4]
    assert [list(rank.stages) for rank in others] == [[0], [1], [2], [3], [4]]
    assert others[2].recomputed == others[1].recomputed == (("0",),)
