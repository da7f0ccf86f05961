"""What was offloaded to host memory, or looked at, may be given another size afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pp_offload import CpuBackend, OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload.backends import Backend
from pp_offload.testing import SimulatedBackend


def train(device: torch.device, manager: PipelineOffloadManager | None) -> list[Tensor]:
    """One buffer for batches of any length."""
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
            y = (batch @ weight).tanh()
        if manager is not None:
            off_interface.group_commit(y, "a")
        y.sum().backward()
        if manager is not None:
            manager.backend.synchronize()
        assert weight.grad is not None
        found.append(weight.grad.clone())
    return found


@pytest.mark.parametrize("is_verified", [False, True])
@pytest.mark.parametrize("backend", [CpuBackend(), SimulatedBackend("eager")], ids=["cpu", "eager"])
def test_another_size(backend: Backend, is_verified: bool) -> None:
    config = OffloadConfig(min_offloaded_tensor_size=1, verify=is_verified)
    with use_backend(backend, config=config) as manager:
        device = manager.backend.device
        expected = train(device, None)
        assert all(map(torch.equal, train(device, manager), expected))
