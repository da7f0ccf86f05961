"""F20: backward may visit groups, and the tensors of one, in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import pytest
import torch
from conftest import BACKENDS, make_backend
from field_checks import make_inputs, part
from torch import Tensor, nn
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, use_backend

pytestmark = pytest.mark.field("F20")

NAMES = ("a", "b", "c", "d")

windows = pytest.mark.parametrize("prefetch_bytes", [0, 300, 2**20])
on_backends = pytest.mark.parametrize("kind", BACKENDS)


def config(prefetch_bytes: int) -> OffloadConfig:
    """Nothing is in flight when backward begins, so every tensor is reloaded."""
    return OffloadConfig(
        min_offloaded_tensor_size=1, prefetch_bytes=prefetch_bytes, max_in_flight_bytes=0
    )


def weights_on(device: torch.device) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randn(6, 6, generator=generator) / 2 for _ in NAMES]
    return [nn.Parameter(w.to(device)) for w in drawn]


def crossed(x: Tensor, weights: Sequence[Tensor], is_on: bool) -> Tensor:
    """Groups of two branches in turns: forward is a1 b1 a2 b2, backward b2 b1 a2 a1."""
    left = part("a", x, weights[0], is_on)
    right = part("b", x * 2, weights[1], is_on)
    left = part("a", left, weights[2], is_on)
    right = part("b", right, weights[3], is_on)
    return left.sum() * 3 + right.sum()


def branch_used_late(x: Tensor, weights: Sequence[Tensor], is_on: bool) -> Tensor:
    """The first group's output meets the others only at the end; it is the first in backward."""
    first = part("a", x, weights[0], is_on)
    h = x
    for name, weight in zip(NAMES[1:], weights[1:], strict=True):
        h = part(name, h, weight, is_on)
    return (h * first.sin()).square().mean()


def gradient_in_forward(x: Tensor, weights: Sequence[Tensor], is_on: bool) -> Tensor:
    """Group b is used before c and d have been, and again after them."""
    a, b = (part(name, x, w, is_on) for name, w in zip("ab", weights, strict=False))
    (of_b,) = torch.autograd.grad(b.sum(), x, retain_graph=True)
    c = part("c", of_b * a, weights[2], is_on)
    return c.sum() + part("d", b, weights[3], is_on).sum()


Program = Callable[[Tensor, Sequence[Tensor], bool], Tensor]


@windows
@on_backends
@pytest.mark.parametrize("program", [crossed, branch_used_late, gradient_in_forward])
def test_two_branches(kind: str, program: Program, prefetch_bytes: int) -> None:
    with use_backend(make_backend(kind), config=config(prefetch_bytes)) as manager:
        device = manager.backend.device

        def step(is_on: bool, number: int) -> list[Tensor]:
            weights = weights_on(device)
            if is_on:
                off_interface.reset()
            losses = []
            for x in make_inputs(2, step=number, device=device):
                if is_on:
                    off_interface.init_chunk_handler(None, None, 1)
                losses.append(program(x.requires_grad_(), weights, is_on))
            while losses:
                losses.pop(0).backward()
            return [w.grad for w in weights]

        for number in range(3):
            assert same_bits(step(True, number), step(False, number)), number
            assert_idle(manager)
        assert manager.statistics().bytes_reloaded > 0


@windows
@on_backends
def test_groups_in_every_order(kind: str, prefetch_bytes: int) -> None:
    """Four branches of one input; their gradients are asked for one by one."""
    with use_backend(make_backend(kind), config=config(prefetch_bytes)) as manager:
        weights = weights_on(manager.backend.device)
        (x,) = make_inputs(1, device=manager.backend.device)

        def branches(is_on: bool) -> list[Tensor]:
            if is_on:
                off_interface.init_chunk_handler(None, None, 1)
            return [
                part(name, x * (i + 1), weight, is_on).sum()
                for i, (name, weight) in enumerate(zip(NAMES, weights, strict=True))
            ]

        expected = torch.autograd.grad(sum(branches(False)), weights)
        for order in permutations(range(len(NAMES))):
            before = manager.statistics().bytes_offloaded
            outputs = branches(True)
            assert manager.statistics().bytes_offloaded >= before + 4 * x.nbytes
            for index in order:
                (got,) = torch.autograd.grad(outputs[index], weights[index])
                assert same_bits([got], [expected[index]]), order
            del outputs
            assert_idle(manager)


@windows
@on_backends
def test_tensors_of_a_group_in_every_order(kind: str, prefetch_bytes: int) -> None:
    """Some of them large enough to have a buffer of their own, some not."""
    with use_backend(make_backend(kind), config=config(prefetch_bytes)) as manager:
        device = manager.backend.device
        weights = [nn.Parameter(torch.ones(n, 6, device=device)) for n in (1, 7, 30, 44_000)]
        base = torch.linspace(-1, 1, 6, device=device)
        for order in permutations(range(len(weights))):
            off_interface.init_chunk_handler(None, None, 1)
            before = manager.statistics().bytes_offloaded
            with off_interface(True, base, "core"):
                products = [
                    w * (base * (i + 2)).expand_as(w).clone() for i, w in enumerate(weights)
                ]
            products = off_interface.group_commit(products, name="core")
            moved = manager.statistics().bytes_offloaded - before
            assert moved == sum(w.nbytes for w in weights)
            for index in order:
                (got,) = torch.autograd.grad(products[index].sum(), weights[index])
                assert same_bits([got], [(base * (index + 2)).expand_as(got).clone()]), order
            del products
            assert_idle(manager)
