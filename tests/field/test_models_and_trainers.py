"""Models and trainers as users have them: F11, F44, F46."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import on_two_backends, skip_on_emulated
from helpers.scenarios import begin
from helpers.toy import batches, make_model, run_step, same_bits
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from pp_offload import OffloadConfig, PipelineOffloadManager, configure, offload_modules
from pp_offload.backends import Backend

# F44: a group that does nothing


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


# F46: the Trainer of Hugging Face: two microbatches a step, and an evaluation after it


CHECKPOINTS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "wrapped": None,
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
}


def build(lora: bool, checkpoint: str, is_tied: bool) -> Any:
    from helpers.tiny_llama import make_llama

    model = make_llama(is_tied=is_tied, lora={} if lora else None)
    if checkpoint == "wrapped":  # with LoRA, adapters are inside
        names = [n for n, _ in model.named_modules() if n.endswith(("mlp", "q_proj"))]
        parts = [model.get_submodule(name) for name in names]
        apply_activation_checkpointing(model, check_fn=lambda module: module in parts)
    return model


@pytest.mark.field("F46")
@pytest.mark.covering(1)
@on_two_backends
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "full"])
def test_a_trainer_has_the_same_gradients(
    backend: Backend, lora: bool, checkpoint: str, is_tied: bool, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    from helpers.tiny_llama import CHECKPOINTING, assert_nothing_left, make_trainer, plain, train

    skip_on_emulated(backend, "accelerate knows no such device, and trains on the CPU")
    kwargs, make = CHECKPOINTS[checkpoint], partial(build, lora, checkpoint, is_tied)
    options = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": kwargs} if kwargs else {}
    expected = plain(make, tmp_path / "a", **options, use_cpu=backend.device.type == "cpu")
    with backend.activate():
        trainer = make_trainer(make(), tmp_path / "b", backend=backend, **options)
        assert same_bits(train(trainer), expected)
        assert trainer.activation_offload.statistics().bytes_offloaded > 0
        assert_nothing_left(trainer)
