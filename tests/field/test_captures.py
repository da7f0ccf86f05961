"""F24: a capture never waits for, or asks about, what another capture or nobody captured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from field_checks import Chain, make_inputs
from torch import Tensor
from toy import assert_no_hooks, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    OffloadConfig,
    PipelineOffloadManager,
    fine_grained_offloading_backward_record,
    fine_grained_offloading_group_flush_delayed_groups,
    use_backend,
)
from pp_offload.errors import CaptureError, NotWhileCapturingError
from pp_offload.testing import SimulatedBackend

pytestmark = pytest.mark.field("F24")

ORDERS = ["late", "eager", "random"]


class Event:
    """What the reference gives: recorded on the stream it is told."""

    def record(self, stream: Any) -> None:
        self.at = stream.record_event()


@contextmanager
def manager_of(order: str, **options: Any) -> Iterator[tuple[PipelineOffloadManager, Any]]:
    device = SimulatedBackend(order)
    config = OffloadConfig(min_offloaded_tensor_size=1, **options)
    with use_backend(device, config=config) as manager:
        yield manager, device


def step(model: Chain, inputs: list[Tensor], device: Any = None) -> list[Tensor]:
    """Forward and backward of each microbatch; as captures of their own with a ``device``."""
    capture = nullcontext if device is None else device.capture
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = []
    if model.is_on:
        off_interface.reset()
    for leaf in leaves:
        with capture():
            if model.is_on:
                off_interface.init_chunk_handler(None, None, 1)
                entered = fine_grained_offloading_backward_record(leaf, Event())
            outputs.append(model(entered if model.is_on else leaf).square().mean())
            if model.is_on:
                off_interface.forward_record(Event())
    for y in outputs:
        with capture():
            y.backward()
    found = [leaf.grad for leaf in leaves if leaf.grad is not None]
    found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def pair() -> tuple[Chain, Chain]:
    return Chain(), Chain(is_on=False)


@pytest.mark.parametrize("order", ORDERS)
def test_sibling_captures(order: str) -> None:
    """Forwards and backwards of two microbatches are four graphs."""
    with manager_of(order) as (manager, device):
        on, off = pair()
        inputs = make_inputs(2)
        expected = step(off, inputs)
        assert same_bits(step(on, inputs), expected), "the step that makes host memory"
        before = manager.statistics()
        for _ in range(2):
            assert same_bits(step(on, inputs, device), expected)
        after = manager.statistics()
        assert after.bytes_offloaded > before.bytes_offloaded
        assert after.bytes_reloaded > before.bytes_reloaded
        assert same_bits(step(on, inputs), expected), "and outside again"
        assert_no_hooks()


@pytest.mark.parametrize("order", ORDERS)
def test_one_capture_of_a_whole_step(order: str) -> None:
    with manager_of(order) as (manager, device):
        on, off = pair()
        inputs = make_inputs(2)
        expected = step(off, inputs)
        step(on, inputs)
        with device.capture():
            got = step_in_a_capture(on, inputs)
        assert same_bits(got, expected)
        assert manager.statistics().bytes_reloaded > 0


def step_in_a_capture(model: Chain, inputs: list[Tensor]) -> list[Tensor]:
    found = step(model, inputs)
    off_interface.forward_record(Event())
    return found


@pytest.mark.parametrize("order", ORDERS)
def test_memory_of_a_graph_is_its_own(order: str) -> None:
    """The graph may be launched again, so nobody else may get its host memory."""
    with manager_of(order) as (manager, device):
        on, _ = pair()
        inputs = make_inputs(1)
        step(on, inputs)
        idle = manager.statistics().host_bytes_in_use
        step(on, inputs, device)
        held = manager.statistics().host_bytes_in_use
        assert idle == 0 < held
        step(on, inputs)
        assert manager.statistics().host_bytes_in_use == held


@pytest.mark.parametrize("order", ORDERS)
def test_exception_in_a_capture(order: str) -> None:
    with manager_of(order) as (_, device):
        on, off = pair()
        inputs = make_inputs(2)
        expected = step(off, inputs)
        step(on, inputs)
        off_interface.reset()
        off_interface.init_chunk_handler(None, None, 1)
        with pytest.raises(ZeroDivisionError), device.capture():
            with off_interface(True, inputs[0], "a") as x:
                y = (x * on.weights[0][0]).exp()
            off_interface.group_commit(y, name="a")
            raise ZeroDivisionError
        assert same_bits(step(on, inputs, device), expected)
        assert same_bits(step(on, inputs), expected)
        assert_no_hooks()


@pytest.mark.parametrize("order", ORDERS)
def test_commits_delayed_until_after_the_capture(order: str) -> None:
    with manager_of(order) as (manager, device):
        on, _ = pair()
        weight = on.weights[0].detach().clone().requires_grad_()
        (x,) = make_inputs(1)
        off_interface.init_chunk_handler(None, None, 1)
        with device.capture():
            with off_interface(True, x, "a") as marked:
                y = torch.tanh(marked @ weight).sin()
            y = off_interface.group_commit(y, name="a", delay_offload=True)
        assert manager.statistics().bytes_offloaded == 0
        fine_grained_offloading_group_flush_delayed_groups()
        assert manager.statistics().bytes_offloaded > 0
        y.sum().backward()
        assert weight.grad is not None
        expected = torch.autograd.grad(torch.tanh(x @ weight).sin().sum(), weight)
        assert same_bits([weight.grad], expected)


def test_without_host_memory_the_group_stays(caplog: pytest.LogCaptureFixture) -> None:
    with manager_of("late") as (manager, device):
        on, off = pair()
        inputs = make_inputs(1)
        assert same_bits(step(on, inputs, device), step(off, inputs))
        assert manager.statistics().bytes_offloaded == 0
    assert "run a step with offload before capturing" in caplog.text


def test_the_disk_takes_nothing_in_a_capture(caplog: pytest.LogCaptureFixture) -> None:
    with manager_of("late", tiers=("disk",)) as (manager, device):
        on, off = pair()
        inputs = make_inputs(1)
        step(on, inputs)
        written = manager.statistics().disk_bytes_written
        assert same_bits(step(on, inputs, device), step(off, inputs))
        assert manager.statistics().disk_bytes_written == written > 0
    assert "cannot be part of a captured graph" in caplog.text


def test_the_disk_is_not_read_in_a_capture() -> None:
    with manager_of("late", tiers=("disk",)) as (manager, device):
        on, _ = pair()
        (x,) = make_inputs(1)
        off_interface.init_chunk_handler(None, None, 1)
        y = on(x.requires_grad_()).sum()
        manager.backend.synchronize()
        while manager.statistics().host_bytes_in_use:
            pass  # on its way to the disk
        with pytest.raises(NotWhileCapturingError, match="keep what it needs in host"):
            with device.capture():
                y.backward()


def test_what_comes_ahead_from_disk_refuses_no_capture() -> None:
    """The captured group is on the host, and the next chunk on disk."""
    gc.collect()  # the budget is that of all managers
    wide = torch.linspace(-1, 1, 2**21)
    with manager_of("late", tiers=("host", "disk"), host_budget_bytes=2**24) as (manager, device):
        off_interface.reset()
        leaves = [part.clone().requires_grad_() for part in (wide, wide[2**18 :])]
        outputs = []
        for leaf in leaves:
            off_interface.init_chunk_handler(None, None, 1)
            with off_interface(True, leaf * 1, "part") as x:
                y = x.exp()
            outputs.append(off_interface.group_commit(y, name="part").sum())
        del x, y
        manager.backend.synchronize()
        assert manager.statistics().disk_bytes_written
        while manager.offloader.engine.mover.tier.furthest() is not None:
            manager.statistics()  # on its way to the disk
        with device.capture():
            outputs[0].backward()
            manager.offloader.engine.mover.join()
        outputs[1].backward()
        assert same_bits([leaf.grad for leaf in leaves], [wide.exp(), wide[2**18 :].exp()])


def test_rules_of_the_simulator() -> None:
    device = SimulatedBackend("late")
    compute, d2h = device.current_stream(), device.d2h
    before = compute.record_event()
    with pytest.raises(CaptureError, match="no capture"), device.capture():
        compute.wait_event(before)
    with pytest.raises(CaptureError, match="queried"), device.capture():
        before.query()
    with pytest.raises(NotWhileCapturingError), device.capture():
        device.allocate_host(8)
    with pytest.raises(CaptureError, match="has not waited for stream d2h"), device.capture():
        d2h.wait_event(compute.record_event())
    with device.capture():
        captured = compute.record_event()
        d2h.wait_event(captured)
        compute.wait_event(d2h.record_event())
    with pytest.raises(CaptureError, match="recorded in capture 5"), device.capture():
        d2h.wait_event(captured)
    with pytest.raises(CaptureError, match="asked about"):
        captured.query()
