"""F43: host copies stay until the weights have gradients, and no longer; losses may be kept."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import BACKENDS, make_backend
from field_checks import Chain, make_inputs
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend

pytestmark = pytest.mark.field("F43")

MICROBATCHES = 5


def step(model: Chain, inputs: list[Tensor], delay: int, held: list[int]) -> list[Tensor]:
    """The weights' gradients ``delay`` microbatches behind; bytes on the host before each."""
    losses, leaves, results = [], [], []
    waiting: list[Any] = []
    if model.is_on:
        off_interface.reset()

    def make_weight_gradients() -> None:
        if model.is_on:
            held.append(PipelineOffloadManager.get_instance().statistics().host_bytes_in_use)
        stage_backward_weight(model.parameters(), waiting.pop(0))

    for x in inputs:
        if model.is_on:
            off_interface.init_chunk_handler(None, None, 1)
        leaves.append(x.clone().requires_grad_())
        losses.append(model(leaves[-1]).square().mean())
    for leaf, loss in zip(leaves, losses, strict=True):
        gradients, groups = stage_backward_input([loss], None, [leaf], model.parameters())
        results += [g for g in gradients if g is not None]
        waiting.append(groups)
        if len(waiting) > delay:
            make_weight_gradients()
    while waiting:
        make_weight_gradients()
    if model.is_on:
        held.append(PipelineOffloadManager.get_instance().statistics().host_bytes_in_use)
    results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return results + losses


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("delay", [0, 1, 3, MICROBATCHES])
def test_weight_pass_delayed(kind: str, delay: int) -> None:
    with use_backend(
        make_backend(kind),
        config=OffloadConfig(device_limit_bytes=None, min_offloaded_tensor_size=1),
    ) as manager:
        device = manager.backend.device
        on, off = Chain(device=device), Chain(is_on=False, device=device)
        kept = []
        for number in range(3):
            inputs = make_inputs(MICROBATCHES, step=number, device=device)
            held: list[int] = []
            found = step(on, inputs, delay, held)
            kept.append(found)
            assert same_bits(found, step(off, inputs, delay, [])), number
            assert all(held[:-1]), "there for the weights"
            assert held[-1] == 0, "although the losses are kept"
            assert_idle(manager)
