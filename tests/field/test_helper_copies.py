"""F08: what a helper copy makes of a view is in order with compute and with the transfer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, PipelineOffloadManager
from pp_offload.backends import Backend

pytestmark = pytest.mark.field("F08")

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "offset 1": lambda t: t.view(-1)[1:],
    "offset 1 small": lambda t: t.view(-1)[1:4],
    "transposed": lambda t: t.t(),
    "every other column": lambda t: t[:, ::2],
    "one column": lambda t: t[:, 3:4],
    "columns, expanded": lambda t: t[:, 1:2].expand(-1, 9),
    "diagonal": lambda t: t.diagonal(1),
    "padded rows": lambda t: t[:, :5],
    "scalar": lambda t: t[2, 3],
}


views = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])


@pytest.mark.covering(2)
@views
@dtypes
def test_views(
    manager: PipelineOffloadManager, view: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    device = manager.backend.device

    def run(is_on: bool, step: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, 8, generator=generator).to(dtype).to(device).requires_grad_()
        if is_on:
            manager.reset()
            manager.init_model_chunk_offload_handler(None, None, 1)
        total = 0
        for name in ("a", "b"):
            h = x * 3
            with off_interface(is_on, h, name) as marked:
                y = view(marked).sin()
            del h, marked
            if is_on:
                y = off_interface.group_commit(y, name=name)
            total = total + y.sum().abs()
        noise = torch.full((6, 8), 7.0, device=device)
        total.backward()
        del noise
        return [total.detach(), x.grad]

    for step in range(3):
        assert same_bits(run(True, step), run(False, step)), step
        assert_idle(manager)
    assert manager.statistics().bytes_offloaded > 0


@pytest.mark.covering(2)
@views
@dtypes
def test_views_in_the_context(
    activations: OffloadActivations,
    backend: Backend,
    view: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
) -> None:
    activations.stash.max_tensors = 1

    def run(is_on: bool, step: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, 8, generator=generator).to(dtype).to(backend.device).requires_grad_()
        total = 0
        for _ in range(2):
            h = x * 3
            with activations if is_on else nullcontext():
                y = view(h).sin()
            del h
            total = total + y.sum().abs()
        noise = torch.full((6, 8), 7.0, device=backend.device)
        total.backward()
        del noise
        return [total.detach(), x.grad]

    for step in range(3):
        assert same_bits(run(True, step), run(False, step)), step
        assert_idle(activations)
    assert activations.statistics().bytes_offloaded > 0
