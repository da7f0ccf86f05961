"""Every option of ``OffloadConfig`` reaches, through every product, what acts on it.

What it does there is tested elsewhere. Here calls of what acts are noted, while a product that was
given the option makes its engine and runs two steps.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from toy import make_model

from pp_offload import (
    ActivationCheckpointing,
    ActivationCheckpointingVariants,
    CpuBackend,
    FullACParams,
    OffloadActivations,
    OffloadConfig,
    OffloadModel,
    attach,
    configure,
    use_backend,
)
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload._common.offload_plan import OffloadPlan, RankPlan
from pp_offload._core.mover import Mover
from pp_offload._core.recipes import Recipes
from pp_offload._core.verify import Verifier
from pp_offload._core.window import Window
from pp_offload._groups import step
from pp_offload._groups.chunk import Chunk
from pp_offload._groups.room import DeviceRoom
from pp_offload._groups.split_backward import SplitBackward
from pp_offload._memory import disk_file
from pp_offload._memory.budget import HostBudget


class Listened(NamedTuple):
    """Who acts on an option."""

    owner: Any
    function: str
    parameter: str
    expected: Any
    """What the parameter has to be, or whether it is right."""


def plans_with(**options: object) -> Callable[[OffloadConfig], bool]:
    """Whether the plan is made with these options."""
    return lambda config: all(getattr(config, name) == value for name, value in options.items())


VALUES: dict[str, Any] = {
    "min_offloaded_tensor_size": 3,
    "delta_offload_bytes_across_pp_ranks": 96,
    "activation_offload_fraction": 0.5,
    "plan": OffloadPlan("a test", 0, 0.0, 0.0, (RankPlan(()),)),
    "max_in_flight_bytes": 12345,
    "prefetch_bytes": 54321,
    "device_limit_bytes": 2**20 + 3,
    "rematerialize": "cheap",
    "split_backward": "keep",
    "host_budget_bytes": 2**27 + 1,
    "tiers": ("host", "disk"),
    "disk_dir": "here",
    "verify": True,
}

LISTENED = {
    "min_offloaded_tensor_size": Listened(Chunk, "__init__", "min_offloaded_tensor_size", 3),
    "delta_offload_bytes_across_pp_ranks": Listened(
        step, "make_plan", "config", plans_with(delta_offload_bytes_across_pp_ranks=96)
    ),
    "activation_offload_fraction": Listened(
        step, "make_plan", "config", plans_with(activation_offload_fraction=0.5)
    ),
    "plan": Listened(step, "make_plan", "config", lambda config: config.offload_plan is not None),
    "max_in_flight_bytes": Listened(Mover, "__init__", "max_in_flight_bytes", 12345),
    "prefetch_bytes": Listened(Window, "__init__", "window_bytes", 54321),
    "device_limit_bytes": Listened(DeviceRoom, "begin_step", "limit", 2**20 + 3),
    "rematerialize": Listened(Recipes, "__init__", "self", lambda recipes: True),
    "split_backward": Listened(SplitBackward, "__init__", "is_keeping", True),
    "host_budget_bytes": Listened(HostBudget, "__init__", "limit_bytes", 2**27 + 1),
    "tiers": Listened(disk_file, "unnamed_file", "directory", lambda path: True),
    "disk_dir": Listened(disk_file, "unnamed_file", "directory", lambda path: path.name == "here"),
    "verify": Listened(Verifier, "__init__", "self", lambda verifier: True),
}

ENGINE = {"max_in_flight_bytes", "host_budget_bytes", "verify"}
STASH = ENGINE | {"rematerialize", "prefetch_bytes", "tiers", "disk_dir"}
GROUPS = STASH | {
    "delta_offload_bytes_across_pp_ranks",
    "activation_offload_fraction",
    "plan",
    "device_limit_bytes",
}


def run_groups() -> None:
    """Two steps, and the begin of a third, which has learned."""
    model = make_model()
    for _ in range(2):
        off_interface.reset()
        off_interface.init_chunk_handler(None, None, 1)
        model(torch.ones(2, 8)).sum().backward()
    off_interface.reset()


def through_a_fresh_manager(config: OffloadConfig) -> None:
    with use_backend(CpuBackend(), config=config):
        run_groups()


def through_configure(config: OffloadConfig) -> None:
    with use_backend(CpuBackend()):
        configure(config)
        run_groups()


def through_a_schedule(config: OffloadConfig) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cpu")
    try:
        with use_backend(CpuBackend()):
            layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
            pair = [PipelineStage(layer, n, 2, device) for n, layer in enumerate(layers)]
            split: Any = ScheduleInterleavedZeroBubble(pair, 4, loss_fn=nn.functional.mse_loss)
            attach(split, None, config).detach()
            one = PipelineStage(layers[0], 0, 1, device)
            schedule = Schedule1F1B(one, 4, loss_fn=nn.functional.mse_loss)
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
    params = FullACParams(offload_inputs=True, min_offload_size=1, config=config)
    variant = ActivationCheckpointingVariants.FULL_ACTIVATION_CHECKPOINTING
    model = nn.Sequential(make_model(groups=()))
    ActivationCheckpointing.apply_activation_checkpointing_(
        variant, "0", model, params, backend=CpuBackend()
    )
    model(torch.ones(2, 8)).sum().backward()


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
    through_a_fresh_manager: GROUPS,
    through_configure: GROUPS,
    through_a_schedule: GROUPS | {"min_offloaded_tensor_size", "split_backward"},
    through_offload_activations: STASH,
    through_checkpoints: STASH,
    through_offload_model: STASH,
}
"""With the options that mean something there."""

CASES = [(product, name) for product, names in PRODUCTS.items() for name in sorted(names)]


def listen(patch: pytest.MonkeyPatch, to: Listened) -> list[Any]:
    """The values of the parameter, in every call from now on."""
    inner = getattr(to.owner, to.function)
    signature, found = inspect.signature(inner), []

    def heard(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        found.append(bound.arguments[to.parameter])
        return inner(*args, **options)

    patch.setattr(to.owner, to.function, heard)
    return found


def test_every_option_means_something_somewhere() -> None:
    names = {field.name for field in dataclasses.fields(OffloadConfig)}
    assert names == set(VALUES) == set(LISTENED) == set().union(*PRODUCTS.values())


@pytest.mark.parametrize(("product", "name"), CASES)
def test_an_option_reaches_what_acts_on_it(
    product: Callable[[OffloadConfig], None],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    to, options = LISTENED[name], {name: VALUES[name]}
    if name in ("tiers", "disk_dir"):
        options = {"tiers": VALUES["tiers"], "disk_dir": tmp_path / "here"}
    found = listen(monkeypatch, to)
    product(OffloadConfig(**options))
    is_right = to.expected if callable(to.expected) else lambda value: value == to.expected
    assert any(map(is_right, found)), found
