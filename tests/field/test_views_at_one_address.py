"""F04: views at one address are told apart: each has its own size, strides and dtype again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
from conftest import on_two_backends
from field_checks import make_inputs
from torch import Tensor
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, PipelineOffloadManager
from pp_offload.backends import Backend

pytestmark = pytest.mark.field("F04")

View = Callable[[Tensor], Tensor]

SAVES: dict[str, View] = {
    "all": lambda x: x,
    "transposed": lambda x: x.t(),
    "without the first row": lambda x: x[1:],
    "without the last row": lambda x: x[:-1],
    "expanded": lambda x: x.expand(3, *x.shape),
    "first row expanded": lambda x: x[0].expand_as(x),
    "as int16": lambda x: x.view(torch.int16),
    "flat": lambda x: x.view(-1),
}

Seen = list[tuple[str, tuple[int, ...], tuple[int, ...], int, torch.dtype, Tensor]]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


class Saves(torch.autograd.Function):
    """Identity that saves a view of its input, and notes what it gets back in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, seen: Seen) -> Tensor:
        ctx.save_for_backward(SAVES[name](x))
        ctx.name, ctx.seen = name, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (saved,) = ctx.saved_tensors
        where = tuple(saved.shape), saved.stride(), saved.storage_offset()
        ctx.seen.append((ctx.name, *where, saved.dtype, saved.clone()))
        return gradient, None, None


def saved_and_seen(
    manager: PipelineOffloadManager | None, dtype: torch.dtype, groups: Sequence[Sequence[str]]
) -> tuple[Seen, list[Tensor]]:
    """Save views of one square matrix, in groups; what backward saw, and the gradient."""
    device = "cpu" if manager is None else manager.backend.device
    if manager is not None:
        manager.reset()
        manager.init_model_chunk_offload_handler(None, None, 1)
    x = make_inputs(1, length=6, device=device)[0].to(dtype).requires_grad_()
    h, seen, parts = x * 1.5, [], []
    for number, names in enumerate(groups):
        with off_interface(manager is not None, h, f"group {number}") as marked:
            part = sum((Saves.apply(marked, name, seen) for name in names), start=0)
        if manager is not None:
            part = off_interface.group_commit(part, name=f"group {number}")
        parts.append(part)
        del marked, part
    del h
    sum(parts, start=0).sum().backward()
    return seen, [x.grad]


def assert_same(got: tuple[Seen, list[Tensor]], expected: tuple[Seen, list[Tensor]]) -> None:
    (seen, gradient), (plain, plain_gradient) = got, expected
    assert [one[:-1] for one in seen] == [one[:-1] for one in plain]
    assert same_bits([one[-1].cpu() for one in seen], [one[-1] for one in plain])
    assert same_bits([g.cpu() for g in gradient], plain_gradient)


@on_two_backends
@dtypes
def test_each_pair_of_views(manager: PipelineOffloadManager, dtype: torch.dtype) -> None:
    """One saved first, the other after it, in one group and in two."""
    for first, second in permutations(SAVES, 2):
        for groups in ([[first, second]], [[first], [second]]):
            got = saved_and_seen(manager, dtype, groups)
            assert_same(got, saved_and_seen(None, dtype, groups))
            assert_idle(manager)


@on_two_backends
@dtypes
@pytest.mark.parametrize("num_groups", [1, 2])
def test_all_of_them_move_once(
    manager: PipelineOffloadManager, dtype: torch.dtype, num_groups: int
) -> None:
    names = list(SAVES)
    groups = [names] if num_groups == 1 else [names, names[::-1]]
    assert_same(saved_and_seen(manager, dtype, groups), saved_and_seen(None, dtype, groups))
    statistics = manager.statistics()
    assert statistics.bytes_offloaded == statistics.host_bytes_peak == 36 * dtype.itemsize
    assert_idle(manager)


@on_two_backends
@dtypes
def test_in_ordinary_operations(manager: PipelineOffloadManager, dtype: torch.dtype) -> None:
    """The gradients of a weight that meets x, x.t(), x[1:] and x.expand differ."""
    device = manager.backend.device

    def run(is_on: bool) -> list[Tensor]:
        x, *values = (t.to(dtype) for t in make_inputs(5, length=6, device=device))
        leaves = [t.requires_grad_() for t in (x, *values)]
        if is_on:
            manager.reset()
            manager.init_model_chunk_offload_handler(None, None, 1)
        h = x * 1.5
        with off_interface(is_on, h, "core") as marked:
            y = marked @ values[0] + marked.t() @ values[1]
            z = marked[1:] * values[2][1:], marked.expand(3, 6, 6) * values[3].expand(3, 6, 6)
        y, z = off_interface.group_commit((y, z), name="core") if is_on else (y, z)
        del h, marked
        (y.sum() + z[0].sum() + z[1].sum()).backward()
        return [t.grad for t in leaves]

    for _ in range(2):
        assert same_bits(run(True), run(False))
        assert manager.statistics().bytes_offloaded > 0
        assert_idle(manager)


@on_two_backends
@dtypes
@pytest.mark.parametrize("stash", [1, 2, len(SAVES)])
def test_in_the_context(
    activations: OffloadActivations, backend: Backend, dtype: torch.dtype, stash: int
) -> None:
    """All views of one matrix, that leave one by one, in pairs, or together: its bytes, once."""
    activations.stash.max_tensors = stash
    for names in (list(SAVES), list(SAVES)[::-1]):
        before = activations.statistics().bytes_offloaded
        x = make_inputs(1, length=6, device=backend.device)[0].to(dtype).requires_grad_()
        h, seen = x * 1.5, []
        with activations:
            y = sum((Saves.apply(h, name, seen) for name in names), start=0)
        del h
        y.sum().backward()
        assert_same((seen, [x.grad]), saved_and_seen(None, dtype, [names]))
        moved = activations.statistics().bytes_offloaded - before
        assert moved == 36 * dtype.itemsize if stash > 2 else moved > 0
        seen.clear()
        del y
        assert_idle(activations)
