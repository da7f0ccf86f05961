"""Every option of ``OffloadConfig`` is read by the engine of every product that was given it.

What an option does is tested elsewhere. Here a record notes which of its options are read, while
a product runs two steps with it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.toy import make_model
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

from pp_offload import (
    CpuBackend,
    OffloadActivations,
    OffloadConfig,
    OffloadModel,
    attach,
    checkpoint_function,
    use_backend,
)

READ: set[str] = set()
"""Options that the package has read, but for the record's own checks."""

OF_PROPERTIES = {"offload_plan": "plan", "limit": "device_limit_bytes"}


class Noted(OffloadConfig):
    """Notes in ``READ`` which options are read."""

    def __getattribute__(self, name: str) -> Any:
        file = sys._getframe(1).f_code.co_filename
        if "/pp_offload/" in file and not file.endswith("/pp_offload/config.py"):
            READ.add(OF_PROPERTIES.get(name, name))
        return super().__getattribute__(name)


ENGINE = {"max_in_flight_bytes", "host_budget_bytes", "verify"}
STASH = ENGINE | {"rematerialize", "prefetch_bytes", "tiers", "disk_dir"}
GROUPS = STASH | {
    "delta_offload_bytes_across_pp_ranks",
    "activation_offload_fraction",
    "plan",
    "device_limit_bytes",
}


def through_a_schedule(config: OffloadConfig) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cpu")
    try:
        with use_backend(CpuBackend()):
            layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
            pair = [PipelineStage(layer, n, 2, device) for n, layer in enumerate(layers)]
            split: Any = ScheduleInterleavedZeroBubble(pair, 4, loss_fn=nn.functional.mse_loss)
            attach(split, None, config).detach()
            stage = PipelineStage(layers[0], 0, 1, device)
            schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
            with attach(schedule, {"layer": "*"}, config):
                for _ in range(3):
                    schedule.step(torch.ones(8, 8), target=torch.ones(8, 8))
    finally:
        dist.destroy_process_group()


def through_offload_activations(config: OffloadConfig) -> None:
    activations = OffloadActivations(config=config, min_offload_size=1, backend=CpuBackend())
    with activations:
        y = make_model(groups=())(torch.ones(2, 8)).sum()
    y.backward()


def through_checkpoints(config: OffloadConfig) -> None:
    run = checkpoint_function(
        offload_inputs=True, min_offload_size=1, config=config, backend=CpuBackend()
    )
    run(make_model(groups=()), torch.ones(2, 8)).sum().backward()


def through_offload_model(config: OffloadConfig) -> None:
    model = OffloadModel(
        make_model(groups=()),
        "cpu",
        checkpoint_activation=True,
        backend=CpuBackend(),
        config=config,
    )
    model(torch.ones(2, 8)).sum().backward()


PRODUCTS: dict[Callable[[OffloadConfig], None], set[str]] = {
    through_a_schedule: GROUPS | {"min_offloaded_tensor_size", "split_backward"},
    through_offload_activations: STASH,
    through_checkpoints: STASH,
    through_offload_model: STASH,
}
"""With the options that mean something there."""


def test_every_option_means_something_somewhere() -> None:
    names = {field.name for field in dataclasses.fields(OffloadConfig)}
    assert names == set().union(*PRODUCTS.values())


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_reads_its_options(product: Callable[[OffloadConfig], None]) -> None:
    number = list(PRODUCTS).index(product)  # plans of equal options are made once
    config = Noted(tiers=("host", "disk"), prefetch_bytes=2**20 + number)
    READ.clear()
    product(config)
    assert PRODUCTS[product] <= READ
