"""F37: with only some groups on the host, no more than the window is reloaded and not yet used."""

from __future__ import annotations

import pytest
import torch
from conftest import BACKENDS, make_backend
from field_checks import make_inputs, part
from torch import Tensor, nn
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend

pytestmark = pytest.mark.field("F37")

NAMES = "abcd"
LENGTH, WIDTH = 4, 6
TENSOR_BYTES = LENGTH * WIDTH * 4
MICROBATCHES = 3


class Sampled(torch.autograd.Function):
    """Identity; its backward notes what is on the device unused."""

    @staticmethod
    def forward(ctx, x: Tensor, seen: list[int]) -> Tensor:
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        manager = PipelineOffloadManager.get_instance()
        ctx.seen.append(manager.statistics().bytes_reloaded_unused)
        return gradient, None


def step(
    inputs: list[Tensor], weights: list[nn.Parameter], is_on: bool, seen: list[int]
) -> list[Tensor]:
    """Forward a, b, c, d of every microbatch, then all backwards."""
    if is_on:
        off_interface.reset()
    losses, leaves = [], []
    for x in inputs:
        if is_on:
            off_interface.init_chunk_handler(None, None, 1)
        leaves.append(x.clone().requires_grad_())
        h = leaves[-1]
        for name, weight in zip(NAMES, weights, strict=True):
            h = part(name, h, weight, is_on)
            h = Sampled.apply(h, seen) if is_on else h
        losses.append(h.square().mean())
    for loss in losses:
        loss.backward()
    found = [t.grad.clone() for t in (*leaves, *weights) if t.grad is not None]
    for weight in weights:
        weight.grad = None
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("num_tensors", [1, 2, 3])
@pytest.mark.parametrize("limit", ["fraction", "margin and bytes"])
def test_never_more_than_the_window(kind: str, num_tensors: int, limit: str) -> None:
    window = num_tensors * TENSOR_BYTES
    fraction, delta = (0.5, 0) if limit == "fraction" else (1.0, 4 * TENSOR_BYTES)
    config = OffloadConfig(
        min_offloaded_tensor_size=1,
        prefetch_bytes=window,
        max_in_flight_bytes=0,  # or sources are used themselves
        activation_offload_fraction=fraction,
        delta_offload_bytes_across_pp_ranks=delta,
    )
    with use_backend(make_backend(kind), config=config) as manager:
        device = manager.backend.device
        manager.step.pipeline_rank = 1
        weights = [nn.Parameter(w) for w in make_inputs(4, length=WIDTH, device=device)]
        offloaded = [0]
        for number in range(4):
            inputs = make_inputs(MICROBATCHES, step=number, device=device)
            seen: list[int] = []
            expected = step(inputs, weights, False, [])
            assert same_bits(step(inputs, weights, True, seen), expected), number
            assert len(seen) == MICROBATCHES * len(NAMES)
            assert max(seen) <= window, number
            offloaded.append(manager.statistics().bytes_offloaded)
            assert_idle(manager)
        per_step = [after - before for before, after in zip(offloaded, offloaded[1:], strict=False)]
        assert 0 < per_step[-1] < per_step[0], "some groups stay"
        assert manager.statistics().prefetched_reloads > 0


def test_a_window_is_what_bounds_it(manager: PipelineOffloadManager) -> None:
    """With a wide one, more is there at a time than the narrow ones above allow."""
    device = manager.backend.device
    weights = [nn.Parameter(w) for w in make_inputs(4, length=WIDTH, device=device)]
    seen: list[int] = []
    for number in range(2):
        step(make_inputs(MICROBATCHES, step=number, device=device), weights, True, seen)
    assert max(seen) > 3 * TENSOR_BYTES
