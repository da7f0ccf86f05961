"""F24: a capture waits for, and asks about, nothing outside of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from helpers.scenarios import Chain, begin, make_inputs, manager_on
from helpers.sessions import gradients, group
from torch import Tensor
from toy import assert_no_hooks, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    fine_grained_offloading_backward_record,
)
from pp_offload.testing import SimulatedBackend


class Event:
    """What the reference gives: recorded on the stream it is told."""

    def record(self, stream: Any) -> None:
        self.at = stream.record_event()


@contextmanager
def manager_of(order: str = "late", **options: Any) -> Iterator[tuple[Any, Any]]:
    device = SimulatedBackend(order)
    with manager_on(device, **options) as manager:
        yield manager, device


def step(chain: Chain, device: Any = None, *, is_on: bool = True) -> list[Tensor]:
    """Forward and backward of two microbatches; with a device, each is a capture of its own."""
    capture = nullcontext if device is None else device.capture
    chain.is_on = is_on
    if is_on:
        off_interface.reset()
    leaves, outputs = make_inputs(2), []
    for leaf in leaves:
        with capture():
            begin(is_on)
            x = leaf.requires_grad_()
            x = fine_grained_offloading_backward_record(x, Event()) if is_on else x
            outputs.append(chain(x).square().mean())
            if is_on:
                off_interface.forward_record(Event())
    for y in outputs:
        with capture():
            y.backward()
    return gradients(*leaves, *chain.parameters())


@pytest.mark.field("F24")
@pytest.mark.parametrize("order", ["late", "eager", "random"])
def test_sibling_captures(order: str) -> None:
    """Forwards and backwards of two microbatches are four graphs, or one; one of them may raise."""
    with manager_of(order) as (manager, device):
        chain = Chain()
        expected = step(chain, is_on=False)
        assert same_bits(step(chain), expected), "the step that makes host memory"
        before = manager.statistics()
        for _ in range(2):
            assert same_bits(step(chain, device), expected)
        after = manager.statistics()
        assert after.bytes_offloaded > before.bytes_offloaded
        assert after.bytes_reloaded > before.bytes_reloaded
        held = after.host_bytes_in_use
        assert before.host_bytes_in_use == 0 < held, "the graph may be launched again"
        assert same_bits(step(chain), expected), "and outside again"
        assert manager.statistics().host_bytes_in_use == held
        with device.capture():
            assert same_bits(step(chain), expected)
            off_interface.forward_record(Event())
        manager.reset()
        begin()
        (x,) = make_inputs(1)
        with pytest.raises(ZeroDivisionError), device.capture():
            y = group(x, lambda x: (x * chain.weights[0][0]).exp())
            raise ZeroDivisionError
        assert same_bits(step(chain, device), expected)
        assert same_bits(step(chain), expected)
        assert_no_hooks()
        del y


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
        chain = Chain()
        if options:
            step(chain)
        written = manager.statistics().bytes_offloaded
        assert same_bits(step(chain, device), step(chain, is_on=False))
        assert manager.statistics().bytes_offloaded == written
    assert says in caplog.text
