"""How many bytes leave with some views of a storage, and that each comes back as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.sessions import assert_same, begin_step, drawn, group, session
from torch import Tensor
from torch.autograd import forward_ad

NBYTES = 9600


@pytest.mark.parametrize("is_verified", [False, True])
@pytest.mark.parametrize("kind", ["cpu", "eager"])
def test_a_buffer_is_resized_for_batches_of_any_length(kind: str, is_verified: bool) -> None:
    """Memory that was copied from may be given another size afterwards."""
    weight, batch = drawn(8, 8).requires_grad_(), torch.empty(0)
    with session(kind, verify=is_verified) as manager:
        for length in (4, 6, 2, 9):
            values = drawn(length, 8, seed=length)
            batch.resize_(length, 8).copy_(values)
            begin_step()
            y = group(batch, lambda batch: (batch @ weight).tanh())
            got = torch.autograd.grad(y.sum(), weight)
            manager.backend.synchronize()
            assert_same(got, torch.autograd.grad((values @ weight).tanh().sum(), weight))


@pytest.mark.parametrize("kind", ["cpu", "late"])
@pytest.mark.parametrize("options", [{}, {"verify": True}, {"tiers": ("disk",)}], ids=str)
def test_zeros_of_forward_mode_have_no_memory_and_stay(kind: str, options: dict[str, Any]) -> None:
    """A layer norm's weight has no tangent: zeros are saved for it, and others leave."""
    norm = torch.nn.LayerNorm(8)

    def run(is_on: bool) -> list[Tensor]:
        x = drawn(4, 8).requires_grad_()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            y, tangent = forward_ad.unpack_dual(group(dual, lambda x: norm(x).sin(), is_on))
            loss = (tangent * y).sum()
            return [loss.detach(), *torch.autograd.grad(loss, [x, *norm.parameters()])]

    with session(kind, **options) as manager:
        begin_step()
        assert_same(run(True), run(False))
        assert manager.statistics().bytes_offloaded > 0
        chunk = manager.cur_forward_chunk()
        assert chunk is not None
        zeros = torch._efficientzerotensor((4, 8))
        assert_same([chunk.reload(chunk.offload(zeros)) + torch.ones(4, 8)], [torch.ones(4, 8)])
