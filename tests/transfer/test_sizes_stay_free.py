"""What was offloaded, or looked at, may be given another size once nobody reads it any more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BACKENDS, make_backend
from torch import Tensor

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend


@pytest.fixture(params=["host", "disk", "verified", "verified disk"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"verify": "verified" in request.param}
    if "disk" in request.param:
        found |= {"tiers": ("disk",), "disk_dir": tmp_path}
    return found


def train(device: torch.device, manager: PipelineOffloadManager | None) -> list[Tensor]:
    """One buffer for batches of any length, and a backward that frees early what it was given."""
    torch.manual_seed(0)
    weight = torch.randn(8, 8).to(device).requires_grad_()
    batch, found = torch.empty(0).to(device), []
    for length in (4, 6, 2, 9):
        batch.resize_(length, 8).copy_(torch.randn(length, 8))
        weight.grad = None
        if manager is not None:
            manager.reset()
            off_interface.init_chunk_handler(None, None, 1)
        with off_interface(manager is not None, batch, "a"):
            y = FreesEarly.apply((batch @ weight).tanh())
        if manager is not None:
            off_interface.group_commit(y, "a")
        y.sum().backward()
        if manager is not None:
            manager.backend.synchronize()
            manager.statistics()
        assert weight.grad is not None
        found.append(weight.grad.clone())
    return found


class FreesEarly(torch.autograd.Function):
    """The square; what it saved is its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.clone())
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found = 2 * x * grad
        x.untyped_storage().resize_(0)
        return found


@pytest.mark.parametrize("kind", BACKENDS)
def test_another_size(kind: str, options: dict[str, Any]) -> None:
    with use_backend(make_backend(kind), config=config_with(options)) as manager:
        device = manager.backend.device
        expected = train(device, None)
        assert all(map(torch.equal, train(device, manager), expected))


@pytest.mark.parametrize("kind", ["cpu", "cpu threads"])
def test_what_is_released_by_force_on_a_cpu_is_empty(kind: str, options: dict[str, Any]) -> None:
    with use_backend(make_backend(kind), config=config_with(options)) as manager:
        off_interface.init_chunk_handler(None, None, 1)
        x = torch.randn(64, 64, requires_grad=True)
        h = x * 1
        with off_interface(True, h, "a"):
            y = h.sin()
        off_interface.group_commit(y, "a", forced_released_tensors=[h])
        transfer = manager.wiring.transfer
        for event in transfer.copies.in_flight.events():
            event.synchronize()
        transfer.poll()
        assert h.untyped_storage().nbytes() == 0
        y.sum().backward()
        assert x.grad is not None and torch.equal(x.grad, x.detach().cos())


def config_with(options: dict[str, Any]) -> OffloadConfig:
    return OffloadConfig(min_offloaded_tensor_size=1, **options)
