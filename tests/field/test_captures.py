"""F24: a capture waits for, and asks about, nothing outside of it."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.sessions import assert_no_hooks, begin_microbatch, begin_step, group
from helpers.toy import Event, Net, inputs, manager_of, same_bits, step

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface


@pytest.mark.field("F24")
@pytest.mark.parametrize("order", ["late", "eager", "random"])
def test_sibling_captures(order: str) -> None:
    """Forwards and backwards of two microbatches are four graphs, or one; one of them may raise."""
    with manager_of(order) as (manager, device):
        net = Net()
        expected = step(net, is_on=False)
        assert same_bits(step(net), expected), "the step that makes host memory"
        before = manager.statistics()
        for _ in range(2):
            assert same_bits(step(net, device), expected)
        after = manager.statistics()
        assert after.bytes_offloaded > before.bytes_offloaded
        assert after.bytes_reloaded > before.bytes_reloaded
        held = after.host_bytes_in_use
        assert before.host_bytes_in_use == 0 < held, "the graph may be launched again"
        assert same_bits(step(net), expected), "and outside again"
        assert manager.statistics().host_bytes_in_use == held
        with device.capture():
            assert same_bits(step(net), expected)
            off_interface.forward_record(Event())
        begin_step()
        (x,) = inputs(1)
        with pytest.raises(ZeroDivisionError), device.capture():
            y = group(x, lambda x: (x * net.weights[0][0]).exp())
            raise ZeroDivisionError
        assert same_bits(step(net, device), expected)
        assert same_bits(step(net), expected)
        assert_no_hooks()
        del y


@pytest.mark.field("F24")
def test_copies_from_before_a_capture_are_not_asked_about() -> None:
    with manager_of("late") as (_, device):
        net = Net()
        step(net)
        begin_microbatch()
        y = group(inputs(1)[0], lambda x: (x * net.weights[0][0]).exp())
        with device.capture():
            z = group(y, lambda y: y.sin().exp(), name="captured")
            off_interface.forward_record(Event())
        z.sum().backward()


@pytest.mark.field("F24")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "run a step with offload before"),
        ({"tiers": ("disk",)}, "cannot be part of a captured"),
    ],
)
def test_what_cannot_be_captured_stays(
    options: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The first step, which makes host memory, and any step that writes to the disk."""
    with manager_of(**options) as (manager, device):
        net = Net()
        if options:
            step(net)
        written = manager.statistics().bytes_offloaded
        assert same_bits(step(net, device), step(net, is_on=False))
        assert manager.statistics().bytes_offloaded == written
    assert says in caplog.text
