"""Captures as Megatron-LM's main and Transformer Engine make them, on the simulated device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.captures import manager_of
from helpers.sessions import gradients
from helpers.toy import same_bits
from main_layer import Model, batches, begin, in_group, models, step
from torch import Tensor

from pp_offload.compat.megatron import FineGrainedActivationOffloadingInterface as off_interface


def captured_step(model: Model, inputs: list[Tensor], device: Any = None) -> list[Tensor]:
    """Each forward and each backward is a graph of its own, as Transformer Engine makes them."""
    capture = nullcontext if device is None else device.capture
    leaves = [x.clone().requires_grad_() for x in inputs]
    losses = []
    for leaf in leaves:
        with capture():
            x = off_interface.backward_record(leaf) if model.is_on else leaf
            losses.append(model(x).square().mean())
            if model.is_on:
                off_interface.forward_record()
    for loss in losses:
        with capture():
            loss.backward()
    if model.is_on:
        off_interface.reset(process_group=None)
    return gradients(*leaves, *model.parameters())


@pytest.mark.parametrize(
    ("is_whole", "most"), [(False, None), (False, 0), (False, 1), (True, 0), (True, 1)]
)
@pytest.mark.parametrize("order", ["late", "eager", "random"])
def test_captures(order: str, is_whole: bool, most: int | None) -> None:
    """Of each forward and backward, or of a whole step, where nothing can be asked whether it is
    over: main counts offloads in flight for that.
    """
    with manager_of(order) as (manager, device):
        on, off = models(manager, max_inflight_offloads=most)
        inputs = batches(device.device, 2)
        run = step if is_whole else captured_step
        expected = run(off, inputs)
        assert same_bits(run(on, inputs), expected), "host memory is made"
        before = manager.statistics()
        for _ in range(2):
            if is_whole:
                with device.capture():
                    got = step(on, inputs)
                    off_interface.forward_record()
            else:
                got = captured_step(on, inputs, device)
            assert same_bits(got, expected)
        after = manager.statistics()
        assert after.bytes_offloaded > before.bytes_offloaded
        assert after.bytes_reloaded > before.bytes_reloaded


def test_the_event_is_recorded_where_the_copies_are_joined() -> None:
    """Whoever waits for it goes on behind the captured forward."""
    with manager_of("late") as (_, simulated):
        event = off_interface.cuda_graph_event()
        assert event is off_interface.cuda_graph_event()
        begin()
        stream = off_interface.cuda_graph_stream()
        assert stream is simulated.current_stream()
        y = in_group(torch.ones(9, requires_grad=True) * 1, torch.sin)
        assert simulated.pending > 0
        off_interface.forward_record()
        assert simulated.pending == 0
        event.wait(stream)
        y.sum().backward()
