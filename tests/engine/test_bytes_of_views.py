"""How many bytes leave with some views of a storage, and that each comes back as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import on_two_backends
from helpers.kept import Keeps, Make, Saved
from helpers.sessions import assert_same, begin_step, drawn, group, session, settle
from torch import Tensor
from torch.autograd import forward_ad

from pp_offload import PipelineOffloadManager

NBYTES = 9600

VIEWS: dict[str, tuple[Make, int]] = {
    "permuted": (lambda x: [x.view(4, 10, 60).permute(2, 0, 1)], NBYTES),
    "windows that overlap": (lambda x: [x.unfold(0, 100, 50)], NBYTES),
    "second half": (lambda x: [x[1200:]], 4800),
    "padded rows": (lambda x: [x.view(40, 60)[:, :50]], 8000),
    "every second": (lambda x: [x[::2]], 4800),
    "first and last row": (lambda x: [x.view(3, 800)[::2]], 6400),
    "a block, transposed": (lambda x: [x.view(40, 60)[:9, :11].t()], 9 * 11 * 4),
    "a row, expanded": (lambda x: [x[2001:2061].expand(5, 60)], 240),
    "size one inside, any stride": (lambda x: [x.as_strided((40, 1, 60), (60, 7, 1))], NBYTES),
    "several dtypes": (
        lambda x: [x, x.view(torch.int64), x.view(torch.bfloat16)[7:], x.view(torch.uint8)[3:5]],
        NBYTES,
    ),
    "query, key and value": (lambda x: x.view(40, 60).split(20, dim=1), NBYTES),
    "two with half of it together": (lambda x: [x[:700], x[1700:]], NBYTES),
    "two that end before it": (lambda x: [x[:1400], x[:1300].view(13, 100)], 2700 * 4),
    "two small ones": (lambda x: [x[:100], x.view(40, 60)[:, :3]], 400 + 480),
}
"""Of a storage of 2400 floats, with what has to leave. What lies beside is somebody else's."""


def whole(manager: PipelineOffloadManager) -> Tensor:
    """Floats of any bits, also NaNs."""
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=generator)
    return bits.to(manager.backend.device).view(torch.float32)


@on_two_backends
@pytest.mark.usefixtures("vectors_move")
@pytest.mark.parametrize(("make", "nbytes"), VIEWS.values(), ids=VIEWS)
def test_so_many_bytes_leave_and_come_back(
    manager: PipelineOffloadManager, make: Make, nbytes: int
) -> None:
    begin_step()
    x = whole(manager)
    views, came_back = [Saved.of(view) for view in make(x)], list[Saved]()
    leaf = torch.ones(1, device=x.device, requires_grad=True)
    y = group(leaf, lambda leaf: Keeps.apply(leaf, lambda _: make(x), came_back))
    settle(manager)
    y.sum().backward()
    assert came_back == views
    statistics = manager.statistics()
    assert statistics.bytes_offloaded == statistics.bytes_reloaded == nbytes


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
