"""Host and device memory: F30, F31, F32, F33, F35, F36, F37, F45, F61."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import pytest
import torch
from conftest import on_two_backends
from helpers.sessions import begin_microbatch, group, session
from helpers.toy import batches, make_model, run_step
from helpers.virtual_training import Training, with_limit
from host_memory import Shape, measure_footprint, shape_zoo
from torch import Tensor, nn

from pp_offload import ConfigError, OffloadConfig
from pp_offload.backends import Allocated, Backend

# Host memory


@pytest.mark.field("F30")
@pytest.mark.parametrize("shape", [*shape_zoo(16)][::4], ids=str)
def test_nearly_all_that_is_reserved_was_asked_for(shape: Shape) -> None:
    """Rounded up to powers of two, as the pinned allocator does, it would be as little as 70 %."""
    figures = measure_footprint(shape)
    assert 1 / figures["ours"] >= 0.97
    assert figures["allocations"] == 0


# Device memory


@pytest.mark.field("F35")
@pytest.mark.field("F36")
@on_two_backends
def test_verify_names_who_holds_what_was_offloaded(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    """A list, a variable, or autograd itself for a leaf; without them every byte is free."""
    x = torch.ones(4, 6).to(backend.device).requires_grad_()
    weight, held = nn.Parameter(torch.randn(6, 6).to(backend.device)), []

    def compute(h: Tensor) -> Tensor:
        held.append(h @ weight)
        return held[0].sin()

    with session(backend, verify=True) as manager:
        begin_microbatch()
        y = group(x * 1, compute)
        (message,) = manager.verify()
        assert "group 'part'" in message and "96 bytes" in message and "(4, 6)" in message
        assert "a list of 1" in message
        assert [r.getMessage() for r in caplog.records] == [f"pp_offload: {message}"]
        assert manager.verify() == [], "said once"
        held.clear()
        begin_microbatch()
        y = group(x * 1, compute)
        freed = weakref.ref(held.pop().untyped_storage())
        assert manager.verify() == [] and freed() is None
        variable = x * 1
        y = group(variable, torch.sin)
        (message,) = manager.verify()
        assert "the variable 'variable' of test_verify_names" in message
        assert Path(__file__).name in message
        del variable, message
        y = group(x.detach().clone().requires_grad_(), torch.sin)
        (message,) = manager.verify()
        assert "group 'part'" in message and "leaf" in message
        y.sum().backward()


@pytest.mark.field("F61")
@with_limit(40)
def test_an_allocation_between_steps_takes_no_room_from_them(training: Training) -> None:
    """As by an evaluation, or where a checkpoint is loaded. Nobody resets the device's peak."""
    limit, memory, peak_bytes = training.limit_bytes, training.backend.memory, 0

    def allocated() -> Allocated:
        nonlocal peak_bytes
        peak_bytes = max(peak_bytes, memory.peak_bytes)
        return Allocated(memory.live_bytes, peak_bytes)

    training.backend.allocated = allocated  # type: ignore[method-assign]
    sent = []
    for number in range(9):
        if number == 2:
            torch.empty(2 * limit, dtype=torch.uint8, device="meta")
            assert allocated().peak_bytes >= 2 * limit
        before = training.sent
        assert training.step() <= limit
        sent.append(training.sent - before)
    assert 0 < sent[-1] < 0.8 * sent[0], "some groups stay"


@pytest.mark.field("F45")
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity")
@on_two_backends
@pytest.mark.parametrize("tiers", [("host",), ("disk",)], ids=str)
def test_affinity_is_as_it_was(backend: Backend, tiers: tuple[str, ...]) -> None:
    """Also where a launcher has bound the process, as ``torchrun --numa-binding`` does."""
    before = os.sched_getaffinity(0)
    device = str(backend.device)
    try:
        for bound in (before, {min(before)}):
            os.sched_setaffinity(0, bound)
            with session(backend, tiers=tiers):
                run_step(make_model(device=device), [x.to(device) for x in batches(3)])
                assert os.sched_getaffinity(0) == bound
    finally:
        os.sched_setaffinity(0, before)
    with pytest.raises(ConfigError, match="no option numa_node"):
        OffloadConfig(numa_node=0)  # type: ignore[call-arg]
