"""Between phases, host memory that nothing needs goes back to the system."""

from __future__ import annotations

import torch
from helpers.toy import batches, make_model, moved, run_step

from pp_offload import (
    FineGrainedActivationOffloadingInterface,
    OffloadActivations,
    PipelineOffloadManager,
    release_host_memory,
)
from pp_offload._memory.budget import reserved_bytes
from pp_offload.backends import Backend


def test_it_is_returned_and_the_next_step_is_right(manager: PipelineOffloadManager) -> None:
    device = manager.backend.device
    inputs = [x.to(device) for x in batches(2)]
    expected = run_step(moved(make_model(groups=()), device), inputs, offload=False)
    assert release_host_memory() == 0
    before = reserved_bytes()
    for _ in range(2):
        got = run_step(moved(make_model(), device), inputs)
        assert all(map(torch.equal, got, expected))
        FineGrainedActivationOffloadingInterface.reset()
        held = reserved_bytes() - before
        assert held > 0
        assert release_host_memory() == held
        assert manager.statistics().host_bytes_reserved == 0


def test_what_a_living_graph_saved_stays(backend: Backend, activations: OffloadActivations) -> None:
    x = torch.randn(64, 64, device=backend.device, requires_grad=True)
    with activations:
        y = x
        for _ in range(8):
            y = torch.special.erf(y)
    assert activations.statistics().host_bytes_in_use > 0
    release_host_memory()
    (got,) = torch.autograd.grad(y.sum(), x)
    z = x
    for _ in range(8):
        z = torch.special.erf(z)
    (expected,) = torch.autograd.grad(z.sum(), x)
    assert torch.equal(got, expected)
    release_host_memory()
    assert activations.statistics().host_bytes_reserved == 0
