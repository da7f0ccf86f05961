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


STASH = {
    *("max_in_flight_bytes", "host_budget_bytes", "verify", "rematerialize", "prefetch_bytes"),
    *("tiers", "disk_dir"),
}
GROUPS = {
    *("delta_offload_bytes_across_pp_ranks", "activation_offload_fraction", "plan"),
    *("device_limit_bytes", "min_offloaded_tensor_size", "split_backward"),
}


def through_a_schedule(config: OffloadConfig) -> None:
    cpu, loss_fn = torch.device("cpu"), nn.functional.mse_loss
    with use_backend(CpuBackend()):
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
        pair = [PipelineStage(layer, n, 2, cpu) for n, layer in enumerate(layers)]
        attach(ScheduleInterleavedZeroBubble(pair, 4, loss_fn=loss_fn), None, config).detach()
        schedule = Schedule1F1B(PipelineStage(layers[0], 0, 1, cpu), 4, loss_fn=loss_fn)
        with attach(schedule, {"layer": "*"}, config):
            for _ in range(3):
                schedule.step(torch.ones(8, 8), target=torch.ones(8, 8))


def through_offload_activations(config: OffloadConfig) -> None:
    with OffloadActivations(config=config, min_offload_size=1, backend=CpuBackend()):
        y = make_model(groups=())(torch.ones(2, 8)).sum()
    y.backward()


def through_checkpoints(config: OffloadConfig) -> None:
    options = {"offload_inputs": True, "min_offload_size": 1, "backend": CpuBackend()}
    run = checkpoint_function(config=config, **options)
    run(make_model(groups=()), torch.ones(2, 8)).sum().backward()


def through_offload_model(config: OffloadConfig) -> None:
    options = {"checkpoint_activation": True, "backend": CpuBackend(), "config": config}
    model = OffloadModel(make_model(groups=()), "cpu", **options)
    model(torch.ones(2, 8)).sum().backward()


PRODUCTS: dict[Callable[[OffloadConfig], None], set[str]] = {
    through_a_schedule: STASH | GROUPS,
    through_offload_activations: STASH,
    through_checkpoints: STASH,
    through_offload_model: STASH,
}
"""With the options that mean something there."""


def test_every_option_means_something_somewhere() -> None:
    names = {field.name for field in dataclasses.fields(OffloadConfig)}
    assert names == set().union(*PRODUCTS.values())


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_reads_its_options(
    product: Callable[[OffloadConfig], None], one_rank: None
) -> None:
    number = list(PRODUCTS).index(product)  # plans of equal options are made once
    config = Noted(tiers=("host", "disk"), prefetch_bytes=2**20 + number)
    READ.clear()
    product(config)
    assert PRODUCTS[product] <= READ
