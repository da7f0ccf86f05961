"""Captures as Megatron-LM makes them, on the simulated device and on a GPU."""

from __future__ import annotations

import pytest
import torch
from helpers.captures import manager_of
from helpers.sessions import session
from helpers.toy import make_model, same_bits
from main_layer import batches, begin, in_group, models, step
from torch import Tensor, nn

from pp_offload import (
    fine_grained_offloading_backward_record,
    fine_grained_offloading_forward_record,
)
from pp_offload.compat.megatron import FineGrainedActivationOffloadingInterface as off_interface


@pytest.mark.parametrize("order", ["late", "eager", "random"])
@pytest.mark.parametrize("most", [0, 1])
def test_captures(order: str, most: int) -> None:
    """Of a step, where nothing can be asked whether it is over: main counts offloads in flight."""
    with manager_of(order) as (manager, device):
        on, off = models(manager, max_inflight_offloads=most)
        inputs = batches(device.device, 2)
        expected = step(off, inputs)
        assert same_bits(step(on, inputs), expected), "host memory is made"
        before = manager.statistics()
        for _ in range(2):
            with device.capture():
                got = step(on, inputs)
                off_interface.forward_record()
            assert same_bits(got, expected)
        after = manager.statistics()
        assert after.bytes_offloaded > before.bytes_offloaded
        assert after.bytes_reloaded > before.bytes_reloaded


def test_the_event_is_recorded_where_the_copies_are_joined() -> None:
    """Whoever waits for it goes on behind the captured forward, or the captured backward."""
    with manager_of("late") as (_, device):
        event = off_interface.cuda_graph_event()
        assert event is off_interface.cuda_graph_event()
        stream = off_interface.cuda_graph_stream()
        assert stream is device.current_stream()
        begin()
        leaf = torch.ones(9, requires_grad=True)
        y = in_group(leaf * 1, torch.sin)
        assert device.pending > 0
        off_interface.forward_record()
        assert device.pending == 0
        event.wait(stream)
        y.sum().backward()
        with device.capture():
            begin(0)
            y = in_group(off_interface.backward_record(leaf) * 1, torch.sin)
            off_interface.forward_record()
        with device.capture():
            y.sum().backward()
            event.wait(stream)


def forward_backward(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Loss and gradients, eagerly."""
    leaf = x.clone().requires_grad_()
    loss = model(leaf).square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, [leaf, *model.parameters()])]


@pytest.mark.gpu
def test_a_launch_on_a_gpu_with_other_inputs() -> None:
    """Of a captured forward and a captured backward, as they were introduced."""
    with session("cuda") as manager:
        device = str(manager.backend.device)
        on = make_model(width=64, device=device)
        off = make_model(width=64, groups=(), device=device)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):
                manager.reset()
                manager.init_model_chunk_offload_handler(None, None, 1)
                forward_backward(on, torch.randn(8, 64, device=device))
        torch.cuda.synchronize()
        manager.reset()
        manager.init_model_chunk_offload_handler(None, None, 1)
        static = torch.zeros(8, 64, device=device, requires_grad=True)
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward):
            x = fine_grained_offloading_backward_record(static, torch.cuda.Event())
            loss = on(x).square().mean()
            fine_grained_offloading_forward_record(torch.cuda.Event())
        with torch.cuda.graph(backward, pool=forward.pool()):
            gradients = torch.autograd.grad(loss, [static, *on.parameters()])
        assert manager.statistics().bytes_reloaded > 0
        for step in range(3):
            torch.manual_seed(step)
            inputs = torch.randn(8, 64, device=device)
            with torch.no_grad():
                static.copy_(inputs)
            forward.replay()
            backward.replay()
            assert same_bits([loss.detach(), *gradients], forward_backward(off, inputs)), step
