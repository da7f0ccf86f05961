"""F44: a group that was asked for and does nothing is named in a warning, once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from toy import batches, make_model, run_step

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, configure, offload_modules

pytestmark = pytest.mark.field("F44")


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


def train(model: nn.Module, steps: int = 2, numel: int = 6, is_grad: bool = True) -> None:
    for number in range(steps):
        off_interface.reset()
        for x in batches(2, step=number):
            x = x.to(next(model.parameters()).device).requires_grad_()
            off_interface.init_chunk_handler(None, None, numel)
            with torch.set_grad_enabled(is_grad):
                loss = model(x).square().mean()
            if is_grad:
                loss.backward()
    off_interface.reset()


def test_each_idle_name_once(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    model = Two().to(manager.backend.device)
    with offload_modules(model, GROUPS):
        train(model)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("group 'bypassed' never ran")
    assert said[1].startswith("group 'small' offloaded nothing: none of its 2 groups")
    assert "min_offloaded_tensor_size=6" in said[1]


def test_the_rest_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    """No forward, one without grad, offload disabled, a pattern taken back, markers that work."""
    configure(OffloadConfig(min_offloaded_tensor_size=1))
    model = Two()
    with offload_modules(model, GROUPS):
        off_interface.reset()
        train(model, is_grad=False)
        manager = PipelineOffloadManager.get_instance()
        manager.disable_offload()
        train(model)
        manager.enable_offload()
        off_interface.reset()
    with offload_modules(model, {"called": "called"}):
        train(model)
    run_step(make_model(), batches(2))
    off_interface.reset()
    assert not caplog.records


def test_a_marker_in_a_compiled_region(caplog: pytest.LogCaptureFixture) -> None:
    """The module's forward is traced by a compiler around it, so that its group never opens."""
    model = Two()
    with offload_modules(model, {"called": "called"}):
        train(torch.compile(model, backend="eager"), numel=1)
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("pp_offload")]
    assert [message[:24] for message in ours] == ["group 'called' never ran"]
