"""Recordings: what is logged of groups that do nothing, equal ranks, and short steps."""

from __future__ import annotations

import importlib
import logging
from collections import OrderedDict
from typing import Any

import pytest
import torch
from helpers.virtual_models import KIND, chain
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from pp_offload import OffloadConfig
from pp_offload.plan import record
from pp_offload.simulate import DEVICES, Modules, PipelineOrder

WIDTH = 64
CONFIG = OffloadConfig(min_offloaded_tensor_size=1)
DEVICE = DEVICES["H100"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH, **KIND), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


def modules(num_stages: int, **groups: str) -> Modules:
    """Two layers in each stage, and a part before those of the first stages of two ranks."""
    stages = []
    for index in range(num_stages):
        parts: dict[str, nn.Module] = {"layers": nn.Sequential(Layer(), Layer())}
        if index < 2:
            parts = {"before": nn.Linear(WIDTH, WIDTH, **KIND), **parts}
        stages.append(nn.Sequential(OrderedDict(parts)))
    return Modules(
        stages,
        example=torch.empty(8, WIDTH, **KIND),
        loss_fn=lambda y: y.sum(),
        groups=groups,
        layers="layers.*",
    )


@pytest.mark.parametrize("groups", [{"mlp": "layers.*.mlp", "before": "before"}, {"all": "layers"}])
@pytest.mark.parametrize("each", [1, 3])
def test_groups_of_recomputed_layers_are_not_warned_of(
    each: int, groups: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nor those of one stage while another one of the rank runs alone."""
    schedule = Schedule1F1B if each == 1 else ScheduleInterleaved1F1B
    order = PipelineOrder(schedule, num_ranks=2, num_stages=2 * each, num_microbatches=4)
    work = modules(2 * each, **groups)
    with caplog.at_level(logging.WARNING, logger="pp_offload"):
        for tapes in record(order, work, DEVICE, CONFIG):
            for num in range(tapes.num_layers + 1):
                tapes.recomputing(num)
    assert not caplog.messages


def test_a_group_that_does_nothing_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    order = PipelineOrder(Schedule1F1B, num_ranks=1, num_stages=1, num_microbatches=4)
    with caplog.at_level(logging.WARNING, logger="pp_offload"):
        for tapes in record(order, modules(1, mlp="layers.*.mlp.0", none="layers.*.mlp.1"), DEVICE):
            tapes.recomputing(1)
    assert sorted(line.split(":")[1] for line in caplog.messages) == [
        " group 'mlp' offloaded nothing",
        " group 'none' offloaded nothing",
    ]


# What makes plans of large models quick


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
