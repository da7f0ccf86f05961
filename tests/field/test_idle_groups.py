"""A group that does nothing is told of: F44."""

from __future__ import annotations

import pytest
import torch
from conftest import on_two_backends
from helpers.scenarios import begin
from helpers.toy import batches, make_model, run_step
from torch import Tensor, nn

from pp_offload import OffloadConfig, PipelineOffloadManager, configure, offload_modules


class Two(nn.Module):
    """Calls one of its layers as a module, and of the other only what is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.bypassed = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.small = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.called(x)
        for layer in self.bypassed:
            x = layer(x)
        return self.small(x[:, :1])


GROUPS = {"called": "called", "bypassed": "bypassed", "small": "small"}


def train(model: nn.Module, *, numel: int = 6, is_grad: bool = True) -> None:
    """Two steps of two microbatches, and the end of the second."""
    manager = PipelineOffloadManager.get_instance()
    for number in range(2):
        manager.reset()
        for x in batches(2, step=number):
            x = x.to(next(model.parameters()).device).requires_grad_()
            manager.init_model_chunk_offload_handler(None, None, numel)
            with torch.set_grad_enabled(is_grad):
                loss = model(x).square().mean()
            if is_grad:
                loss.backward()
    manager.reset()


@pytest.mark.field("F44")
@on_two_backends
def test_each_idle_name_once(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    model = Two().to(manager.backend.device)
    with offload_modules(model, GROUPS):
        train(model)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("pp_offload: group 'bypassed' never ran")
    assert second.startswith("pp_offload: group 'small' offloaded nothing: none of its 2 groups")
    assert "min_offloaded_tensor_size=6" in second
    assert "the largest was (5, 1), 5 elements: give min_offloaded_tensor_size=5 to" in second


@pytest.mark.field("F44")
def test_the_rest_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    """No grad, offload disabled, a pattern taken back or new in this step, markers that work."""
    configure(OffloadConfig(min_offloaded_tensor_size=1))
    model, manager = Two(), PipelineOffloadManager.get_instance()
    with offload_modules(model, GROUPS):
        manager.reset()
        train(model, is_grad=False)
        manager.disable_offload()
        train(model)
        manager.enable_offload()
        manager.reset()
    with offload_modules(model, {"called": "called"}):
        train(model)
        with offload_modules(model, {"bypassed": "bypassed"}):
            begin()
            model(batches(1)[0].requires_grad_()).sum().backward()
            manager.reset()
            assert not caplog.records
    run_step(make_model(), batches(2))
    manager.reset()
    assert not caplog.records
