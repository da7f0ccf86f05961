"""Each product once, on two devices, bit for bit: what each version of torch and Python is asked.

It needs torch, numpy and pytest alone. ``tools/with_torch.py 2.14.1`` runs it on that torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BEFORE_2_13, make_backend
from helpers.ranks import run_ranks
from helpers.schedules import ALL, V_SHAPED
from helpers.toy import assert_idle, batches, make_model, run_step, same_bits
from torch import Tensor, nn

from pp_offload import (
    ActivationCheckpointing,
    FullACParams,
    OffloadActivations,
    OffloadConfig,
    OffloadModel,
    SelectiveLayerACParams,
    use_backend,
)
from pp_offload.backends import Backend

pytestmark = pytest.mark.smoke

NUM_LAYERS = 3

CANNOT_RUN = {name for name, _ in V_SHAPED if BEFORE_2_13}
"""Schedules that this torch itself cannot run on gloo, without offload either."""


@pytest.fixture(params=["cpu", "late"])
def device(request: pytest.FixtureRequest) -> Iterator[Backend]:
    backend = make_backend(request.param)
    with backend.activate():
        yield backend


def losses_and_gradients(model: nn.Module, context: Any = None) -> list[Tensor]:
    """Of two steps, the second after an update."""
    found: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        torch.manual_seed(step)
        for x in batches(2, step=step):
            with context or nullcontext():
                loss = model(x).square().mean()
            loss.backward()
            found.append(loss.detach())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found


def layers(seed: int = 0) -> nn.Sequential:
    """With attention, dropout and a linear layer without bias, so ``mm``."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Linear(8, 16, bias=False), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8)
            )
            for _ in range(NUM_LAYERS)
        )
    )


@pytest.mark.slow  # but with -m smoke; tests/test_pipelining.py has all of them, too
def test_every_schedule(tmp_path: Path) -> None:
    """Of ``torch.distributed.pipelining``, on two processes, through ``attach``."""
    virtual = {name: each for name, each in ALL if each != 3 and name not in CANNOT_RUN}
    policies = ("reload", "keep")
    cases = [
        f"{name}:{each}:True:{policies[i % 2]}" for i, (name, each) in enumerate(virtual.items())
    ]
    for rank, found in enumerate(run_ranks(2, cases, tmp_path)):
        assert list(found) == cases
        for case, facts in found.items():
            assert facts["equal"] and facts["tensors"] > 0, f"{case}, rank {rank}"
            assert facts["offloaded"] > 0, f"{case}, rank {rank}"
            assert facts["in_use"] == facts["live"] == [0, 0, 0], f"{case}, rank {rank}"


def test_markers_of_megatron(device: Backend) -> None:
    expected = run_step(make_model(NUM_LAYERS, groups=()), batches(4), in_flight=2, offload=False)
    with use_backend(device, config=OffloadConfig(min_offloaded_tensor_size=1)) as manager:
        model = make_model(NUM_LAYERS)
        for _ in range(3):
            assert same_bits(run_step(model, batches(4), in_flight=2), expected)
        assert manager.statistics().bytes_offloaded > 0
        manager.reset()
        assert_idle(manager)


def test_all_activations(device: Backend) -> None:
    expected = losses_and_gradients(layers())
    context = OffloadActivations(min_offload_size=1, backend=device)
    assert same_bits(losses_and_gradients(layers(), context), expected)
    assert context.statistics().bytes_offloaded > 0


FULL, LAYER, OP = (
    "full_activation_checkpointing",
    "selective_layer_activation_checkpointing",
    "selective_op_activation_checkpointing",
)
MM = "ops.aten.mm.default"
SMALL: dict[str, Any] = {"min_offload_size": 1, "offload_inputs": True}
CHECKPOINTS = {
    "full": (FULL, FullACParams(**SMALL)),
    "reentrant": (FULL, FullACParams(use_reentrant=True, **SMALL)),
    "every other layer": (LAYER, SelectiveLayerACParams(ac_freq=2, early_stop=False, **SMALL)),
    "operators offloaded": (OP, {"offload_ops_keys": [MM], "recompute_every": {}, **SMALL}),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoints(device: Backend, kind: str) -> None:
    expected = losses_and_gradients(layers())
    model = nn.ModuleDict({"layers": layers()})
    variant, params = CHECKPOINTS[kind]
    recompute = ActivationCheckpointing.apply_activation_checkpointing_(
        variant, "layers", model, params, backend=device
    )
    run = Whole(model)
    assert same_bits(losses_and_gradients(run), expected)
    assert recompute.stash.statistics().bytes_offloaded > 0
    assert recompute.counts.recomputed_calls > 0


class Whole(nn.Module):
    """Layers in a model, whose forward begins a microbatch."""

    def __init__(self, model: nn.ModuleDict) -> None:
        super().__init__()
        self.model = model
        model.forward = model["layers"].forward

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


@pytest.mark.parametrize("num_slices", [1, 3])
def test_parameters_on_the_host(device: Backend, num_slices: int) -> None:
    expected = losses_and_gradients(layers())
    model = OffloadModel(layers(), device.device, num_slices=num_slices, backend=device)
    assert same_bits(losses_and_gradients(model), expected)
    assert all(parameter.is_cpu for parameter in model.parameters())


def test_groups_leave_for_disk(device: Backend, tmp_path: Path) -> None:
    expected = run_step(make_model(NUM_LAYERS, groups=()), batches(2), offload=False)
    config = OffloadConfig(
        min_offloaded_tensor_size=1, tiers=("disk",), disk_dir=tmp_path, verify=True
    )
    with use_backend(device, config=config):
        assert same_bits(run_step(make_model(NUM_LAYERS), batches(2)), expected)
