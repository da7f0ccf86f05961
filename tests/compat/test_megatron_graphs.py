"""Captures as Megatron-LM's main and Transformer Engine make them, on the simulated device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from helpers.toy import same_bits
from main_layer import Model, batches, exp_in_a_group, step
from torch import Tensor

from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload.compat.megatron import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload.testing import SimulatedBackend

ORDERS = ("late", "eager", "random")


@contextmanager
def graphs(order: str) -> Iterator[tuple[PipelineOffloadManager, SimulatedBackend]]:
    device = SimulatedBackend(order)
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with use_backend(device, config=config) as manager:
        yield manager, device


def captured_step(model: Model, inputs: list[Tensor], device: Any) -> list[Tensor]:
    """Each forward and each backward is a graph of its own, as Transformer Engine makes them."""
    capture = nullcontext if device is None else device.capture
    leaves = [x.clone().requires_grad_() for x in inputs]
    losses = []
    for leaf in leaves:
        with capture():
            x = leaf
            if model.is_on:
                x = off_interface.backward_record(x)
            losses.append(model(x).square().mean())
            if model.is_on:
                off_interface.forward_record()
    for loss in losses:
        with capture():
            loss.backward()
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    if model.is_on:
        off_interface.reset(process_group=None)
    return gradients


@pytest.mark.parametrize("most", [None, 0, 1])
@pytest.mark.parametrize("order", ORDERS)
def test_captures(order: str, most: int | None) -> None:
    with graphs(order) as (manager, device):
        on, off = Model(torch.device("cpu")), Model(torch.device("cpu"), is_on=False)
        on.options["max_inflight_offloads"] = most
        inputs = batches(torch.device("cpu"), 2)
        expected = captured_step(off, inputs, None)
        assert same_bits(captured_step(on, inputs, None), expected), "host memory is made"
        before = manager.statistics()
        for _ in range(2):
            assert same_bits(captured_step(on, inputs, device), expected)
        after = manager.statistics()
        assert after.bytes_offloaded > before.bytes_offloaded
        assert after.bytes_reloaded > before.bytes_reloaded


@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("order", ORDERS)
def test_one_capture_of_a_whole_step(order: str, most: int) -> None:
    """What main counts offloads in flight for: nothing can be asked whether it is over then."""
    with graphs(order) as (manager, device):
        on, off = Model(torch.device("cpu")), Model(torch.device("cpu"), is_on=False)
        on.options["max_inflight_offloads"] = most
        inputs = batches(torch.device("cpu"), 2)
        expected = step(off, inputs)
        assert same_bits(step(on, inputs), expected), "host memory is made"
        before = manager.statistics().bytes_offloaded
        with device.capture():
            got = step(on, inputs)
            off_interface.forward_record()
        assert same_bits(got, expected)
        assert manager.statistics().bytes_offloaded > before


def test_the_event_is_recorded_where_the_copies_are_joined() -> None:
    """Whoever waits for it goes on behind the captured forward."""
    simulated = SimulatedBackend("late")
    with use_backend(simulated, config=OffloadConfig(min_offloaded_tensor_size=1)):
        event = off_interface.cuda_graph_event()
        assert event is off_interface.cuda_graph_event()
        off_interface.init_chunk_handler(0, None, None, 1, 0, 1.0)
        stream = off_interface.cuda_graph_stream()
        assert stream is simulated.current_stream()
        y = exp_in_a_group(torch.ones(9, requires_grad=True) * 1, "a")
        assert simulated.pending > 0
        off_interface.forward_record()
        assert simulated.pending == 0
        event.wait(stream)
        y.sum().backward()
