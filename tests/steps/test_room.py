"""Memory from step to step: what stays below a device's limit, and what the host gets back."""

from __future__ import annotations

import pytest
import torch
from conftest import on_two_backends
from helpers.sessions import begin_step, group, session
from helpers.toy import batches, make_model, moved, run_step, same_bits

from pp_offload import (
    FineGrainedActivationOffloadingInterface,
    PipelineOffloadManager,
    release_host_memory,
)
from pp_offload._memory.budget import reserved_bytes


@pytest.mark.parametrize("kind", ["late", "random"])
@pytest.mark.parametrize("limit_bytes", [0, 27000, 2**30])
def test_below_any_limit_bits_are_those_without(kind: str, limit_bytes: int) -> None:
    """In steps that differ in how many microbatches there are, and how long these are."""
    bounds = {"max_in_flight_bytes": 200, "prefetch_bytes": 200}
    steps = [(2, 2, 5)] * 4 + [(3, 3, 5), (2, 2, 9), (2, 1, 3)] + [(3, 3, 9)] * 3
    sent = []
    with session(kind, device_limit_bytes=limit_bytes, **bounds) as manager:
        for number, (num, in_flight, length) in enumerate(steps):
            inputs = batches(num, step=number, length=length)
            expected = run_step(make_model(groups=()), inputs, in_flight=in_flight, offload=False)
            before = manager.statistics().bytes_offloaded
            assert same_bits(run_step(make_model(), inputs, in_flight=in_flight), expected)
            sent.append(manager.statistics().bytes_offloaded - before)
        manager.backend.check()
    if limit_bytes == 0:
        assert all(sent)
    elif limit_bytes == 2**30:
        assert sent[0] > 0 and sent[3] == 0 and sent[4] > 0 and sent[-1] == 0
    else:
        assert 0 < sent[-1] < sent[-2], "some stay, and some leave"


@on_two_backends
def test_host_memory_is_returned_and_the_next_step_is_right(
    manager: PipelineOffloadManager,
) -> None:
    """And a living graph keeps what it needs."""
    device = manager.backend.device
    inputs = [x.to(device) for x in batches(2)]
    expected = run_step(moved(make_model(groups=()), device), inputs, offload=False)
    assert release_host_memory() == 0
    before = reserved_bytes()
    for _ in range(2):
        assert same_bits(run_step(moved(make_model(), device), inputs), expected)
        FineGrainedActivationOffloadingInterface.reset()
        held = reserved_bytes() - before
        assert held > 0
        assert release_host_memory() == held
        assert manager.statistics().host_bytes_reserved == 0
    begin_step()
    x = inputs[0].requires_grad_()
    y = group(x * 2, torch.sin).sum()
    assert release_host_memory() == 0, "a graph is alive"
    got = torch.autograd.grad(y, x)
    assert same_bits(got, torch.autograd.grad((x * 2).sin().sum(), x))
