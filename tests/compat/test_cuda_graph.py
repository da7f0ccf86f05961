"""A captured forward and a captured backward, launched again with other inputs, on a GPU."""

from __future__ import annotations

import pytest
import torch
from helpers.toy import make_model, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, fine_grained_offloading_backward_record, use_backend
from pp_offload.backends import default_backend

WIDTH = 64


def forward_backward(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Loss and gradients, eagerly."""
    leaf = x.clone().requires_grad_()
    loss = model(leaf).square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, [leaf, *model.parameters()])]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_replay_with_other_inputs() -> None:
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with use_backend(default_backend(), config=config) as manager:
        device = str(manager.backend.device)
        on = make_model(width=WIDTH, device=device)
        off = make_model(width=WIDTH, groups=(), device=device)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):
                manager.reset()
                manager.init_model_chunk_offload_handler(None, None, 1)
                forward_backward(on, torch.randn(8, WIDTH, device=device))
        torch.cuda.synchronize()
        manager.reset()
        manager.init_model_chunk_offload_handler(None, None, 1)
        static = torch.zeros(8, WIDTH, device=device, requires_grad=True)
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward):
            x = fine_grained_offloading_backward_record(static, torch.cuda.Event())
            loss = on(x).square().mean()
            off_interface.forward_record(torch.cuda.Event())
        with torch.cuda.graph(backward, pool=forward.pool()):
            gradients = torch.autograd.grad(loss, [static, *on.parameters()])
        assert manager.statistics().bytes_reloaded > 0
        for step in range(3):
            torch.manual_seed(step)
            inputs = torch.randn(8, WIDTH, device=device)
            with torch.no_grad():
                static.copy_(inputs)
            forward.replay()
            backward.replay()
            assert same_bits([loss.detach(), *gradients], forward_backward(off, inputs)), step
