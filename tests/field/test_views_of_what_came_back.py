"""F06: a tensor that came back stays good for as long as a view of it is in use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from conftest import BACKENDS, make_backend
from field_checks import make_inputs
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, OffloadConfig, use_backend
from pp_offload.backends import Backend

pytestmark = pytest.mark.field("F06")

View = Callable[[Tensor], Tensor]

VIEWS: dict[str, View] = {
    "transposed": lambda t: t.t(),
    "flat": lambda t: t.view(-1).view(6, 6),
    "strided": lambda t: t.as_strided((6, 6), (1, 5)),
    "row expanded": lambda t: t[2].expand(6, 6),
}

on_backends = pytest.mark.parametrize("kind", BACKENDS)
windows = pytest.mark.parametrize("prefetch_bytes", [0, 200, 2**20])


class GivesView(torch.autograd.Function):
    """The sum of x times a view of h. Its gradient for x is that view, and no copy."""

    @staticmethod
    def forward(ctx: Any, view: View, x: Tensor, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        ctx.view = view
        return (x * view(h)).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (h,) = ctx.saved_tensors
        return None, ctx.view(h), None


class Poisons(torch.autograd.Function):
    """Identity. Its backward takes whatever memory was freed before, and leaves NaN there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        blocks = [torch.full((36,), torch.nan, device=gradient.device) for _ in range(20)]
        blocks.clear()
        return gradient


def grouped(name: str, x: Tensor, is_on: bool, compute: Callable[[Tensor], Tensor]) -> Tensor:
    with off_interface(is_on, x, name) as x:
        y = compute(x)
    return off_interface.group_commit(y, name=name) if is_on else y


def begin(is_on: bool) -> None:
    if is_on:
        off_interface.reset()
        off_interface.init_chunk_handler(None, None, 1)


def config(prefetch_bytes: int) -> OffloadConfig:
    return OffloadConfig(min_offloaded_tensor_size=1, prefetch_bytes=prefetch_bytes)


@pytest.mark.covering(1)
@windows
@on_backends
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_backward_gives_a_view(kind: str, view: View, prefetch_bytes: int) -> None:
    """Views that were gradients are read when other groups, and another step, came back."""

    def run(is_on: bool, device: str, step: int) -> list[Tensor]:
        begin(is_on)
        kept: list[Tensor] = []
        leaves = [x.requires_grad_() for x in make_inputs(4, length=6, step=step, device=device)]
        total = torch.zeros((), device=device)
        for number, leaf in enumerate(leaves):
            h, x = leaf.detach() * 2, Poisons.apply(leaf)
            x.register_hook(kept.append)
            give = partial(GivesView.apply, view, x)
            total = total + Poisons.apply(grouped(f"{number}", h, is_on, give))
            del h, x, give
        total.backward()
        return [*kept, *(leaf.grad for leaf in leaves)]

    with use_backend(make_backend(kind), config=config(prefetch_bytes)) as manager:
        device = str(manager.backend.device)
        found = [run(True, device, step) for step in range(3)]
        for step, got in enumerate(found):
            assert same_bits(got, run(False, device, step)), step
        moved = manager.statistics()
        assert moved.bytes_reloaded + moved.taken_back > 0
        del found, got
        assert_idle(manager)


@pytest.mark.covering(2)
@windows
@on_backends
@pytest.mark.parametrize("is_reentrant", [False, True], ids=["saved hooks", "reentrant"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_checkpoint_in_a_group(
    kind: str, view: View, is_reentrant: bool, prefetch_bytes: int
) -> None:
    """What is recomputed saves views of the input that came back."""

    def run(is_on: bool, device: str, step: int) -> list[Tensor]:
        begin(is_on)
        x, *weights = (t.requires_grad_() for t in make_inputs(4, length=6, device=device))

        def block(h: Tensor, weight: Tensor) -> Tensor:
            seen = view(Poisons.apply(view(h)))
            return Poisons.apply(torch.sin(seen) @ weight) * view(h)

        y = x * (1 + step)
        for number, weight in enumerate(weights):

            def compute(h: Tensor, weight: Tensor = weight) -> Tensor:
                return checkpoint(block, h, weight, use_reentrant=is_reentrant)

            y = grouped(f"{number}", Poisons.apply(y), is_on, compute)
        y.square().sum().backward()
        return [t.grad for t in (x, *weights)]

    with use_backend(make_backend(kind), config=config(prefetch_bytes)) as manager:
        device = str(manager.backend.device)
        for step in range(3):
            assert same_bits(run(True, device, step), run(False, device, step)), step
            assert_idle(manager)
        moved = manager.statistics()
        assert moved.bytes_reloaded + moved.taken_back > 0


@on_backends
def test_read_from_a_graph_that_is_gone(kind: str) -> None:
    """A view of a saved tensor, taken from the graph's node, outlives backward and the graph."""
    with use_backend(make_backend(kind), config=config(0)) as manager:
        begin(True)
        (x,) = make_inputs(1, length=6, device=manager.backend.device)
        y = grouped("core", x.requires_grad_() * 2, True, torch.sin)
        row = y.grad_fn._saved_self[3]
        Poisons.apply(y).sum().backward()
        del y
        begin(True)
        Poisons.apply(grouped("core", x * 3, True, torch.sin)).sum().backward()
        assert same_bits([row.detach()], [(x.detach() * 2)[3]])
        del row
        assert_idle(manager)


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["bare", "checkpointed"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_in_the_context(
    activations: OffloadActivations, backend: Backend, view: View, is_checkpointed: bool
) -> None:
    """Views that were gradients are read when other tensors, and another step, came back."""
    activations.stash.max_tensors = 1

    def run(is_on: bool, step: int) -> list[Tensor]:
        inputs = make_inputs(4, length=6, step=step, device=backend.device)
        leaves, kept = [x.requires_grad_() for x in inputs], []
        with activations if is_on else nullcontext():
            total = torch.zeros((), device=backend.device)
            for leaf in leaves:
                h, x = leaf.detach() * 2, Poisons.apply(leaf)
                x.register_hook(kept.append)
                give = partial(GivesView.apply, view)
                y = checkpoint(give, x, h, use_reentrant=False) if is_checkpointed else give(x, h)
                total = total + Poisons.apply(y)
                del h, x, y
        total.backward()
        return [*kept, *(leaf.grad for leaf in leaves)]

    found = [run(True, step) for step in range(3)]
    for step, got in enumerate(found):
        assert same_bits(got, run(False, step)), step
    moved = activations.statistics()
    assert moved.bytes_reloaded + moved.taken_back > 0
    del found, got
    assert_idle(activations)
