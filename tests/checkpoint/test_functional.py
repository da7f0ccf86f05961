"""``checkpoint`` does to one call what the checkpoints of a model do to its layers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.toy import same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from pp_offload import OffloadConfig, checkpoint, checkpoint_function
from pp_offload.backends import CpuBackend

OFFLOAD = {"offload_inputs": True, "min_offload_size": 1}


def test_inputs_leave_and_nothing_else() -> None:
    """To the byte: each call's input, its mask and its scale, shared ones once per forward."""
    backend = CpuBackend()
    run = checkpoint_function(**OFFLOAD, backend=backend)
    assert run.stash is not None
    block, x = nn.Linear(8, 8), torch.randn(6, 8)
    y = checkpoint(block, x, **OFFLOAD, backend=backend)
    y = checkpoint(lambda a, b: torch.tanh(a["x"]) * b, {"x": y}, b=y, **OFFLOAD, backend=backend)
    assert run.stash.statistics().bytes_offloaded == 2 * x.nbytes, "x, and y once"
    y.sum().backward()
    assert run.counts.recomputed_calls == run.counts.forward_calls == 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_call_written_for_pytorch(use_reentrant: bool) -> None:
    def run(call: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(1)
        layer, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.randn(3, 8)
        x.requires_grad_()
        options = {"use_reentrant": use_reentrant, "preserve_rng_state": True}
        y = call(layer, x, **options)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]

    assert same_bits(run(checkpoint), run(torch_checkpoint))


def test_equal_options_share_one_engine() -> None:
    run = checkpoint_function(offload_inputs=True, config=OffloadConfig(prefetch_bytes=7))
    assert run is checkpoint_function(offload_inputs=True, config=OffloadConfig(prefetch_bytes=7))
    assert run is not checkpoint_function(offload_inputs=True)
    assert run is not checkpoint_function(
        offload_inputs=True, config=OffloadConfig(prefetch_bytes=7), backend=CpuBackend()
    )
    assert checkpoint_function().stash is None


def test_an_engine_goes_with_its_backend() -> None:
    backend = CpuBackend()
    gone = weakref.ref(backend)
    x = torch.ones(64, requires_grad=True)
    checkpoint(torch.sin, x, backend=backend, **OFFLOAD).sum().backward()
    run = checkpoint_function(backend=backend, **OFFLOAD)
    assert run is checkpoint_function(backend=backend, **OFFLOAD)
    del run, backend
    gc.collect()
    assert gone() is None
