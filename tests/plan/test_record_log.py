"""What is logged while tapes are recorded: of groups that do nothing in any step, and no others."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

from pp_offload import OffloadConfig
from pp_offload.plan import record
from pp_offload.simulate import DEVICES, Modules, PipelineOrder

KIND: Any = {"device": "meta", "dtype": torch.bfloat16}
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
