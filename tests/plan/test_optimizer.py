"""An optimizer at the end of each step: its state, what it takes on the way, and its time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.virtual_models import KIND, chain
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

from pp_offload import OffloadConfig
from pp_offload.plan import OffloadPlan, choose, predict, record
from pp_offload.simulate import DEVICES, Modules, PipelineOrder, run_pipeline

pytestmark = pytest.mark.usefixtures("small_floor")

WIDTH = 512
CONFIG = OffloadConfig(min_offloaded_tensor_size=1)
DEVICE = DEVICES["H100"]


def pipeline(optimizer: Any = None) -> tuple[PipelineOrder, Modules]:
    """Two ranks, each with two stages of layers that are large beside what they save."""
    work = chain(
        2,
        lambda: [nn.Sequential(nn.Linear(WIDTH, WIDTH, **KIND), nn.GELU()) for _ in "ab"],
        torch.empty(64, WIDTH, **KIND),
        optimizer=optimizer,
    )
    return PipelineOrder(Schedule1F1B, num_ranks=2, num_stages=2, num_microbatches=4), work


@pytest.mark.parametrize(
    ("optimizer", "of_a_parameter"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p, foreach=False), 2),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
    ],
)
def test_its_state_is_there_from_the_first_step_on(optimizer: Any, of_a_parameter: int) -> None:
    order, work = pipeline(optimizer)
    mine = [parameter.nbytes for parameter in work.stages[0].parameters()]
    both = record(order, work, DEVICE, CONFIG)
    tapes = both[0]
    assert tapes.state_bytes == of_a_parameter * sum(mine)
    assert sum(tensor.nbytes for tensor in tapes.update.later) == 0
    first, second = (predict(order, both, DEVICE, num_steps=num).ranks[0] for num in (1, 2))
    assert second.peak_bytes >= first.peak_bytes


# Plans


def test_a_plan_is_below_its_limit_with_it() -> None:
    order, work = pipeline(torch.optim.AdamW)
    tapes = record(order, work, DEVICE, CONFIG)
    none = predict(order, tapes, DEVICE, num_steps=2)
    most = max(rank.peak_bytes for rank in none.ranks)
    plan = choose(order, tapes, DEVICE, most - 1, config=CONFIG)
    step = run_pipeline(order, work, DEVICE, config=replace(CONFIG, plan=plan), num_steps=3)
    state = [tape.state_bytes for tape in tapes]
    for rank, cost, nbytes in zip(plan.ranks, step.ranks, state, strict=True):
        assert rank.peak_bytes == cost.peak_bytes < most
        assert rank.optimizer_bytes == nbytes > 0
    assert plan.seconds >= plan.least_seconds * (1 - 1e-9)
    assert OffloadPlan.from_dict(plan.to_dict()) == plan


# What is refused


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (torch.optim.Adafactor, "Adafactor"),  # looks at data
        (torch.optim.LBFGS, "LBFGS"),  # wants a closure
        (lambda p: torch.optim.AdamW(p, fused=True), "AdamW"),
    ],
)
def test_one_that_cannot_run_here_is_refused(make: Any, name: str) -> None:
    order, work = pipeline(make)
    message = f"the optimizer is {name}, expected one that can run without data.*leave room"
    for run in (run_pipeline, record):
        with pytest.raises(ValueError, match=message):
            run(order, work, DEVICE, config=CONFIG)
