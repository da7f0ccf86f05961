"""A backward that writes into what it saved, also while the copy of that to the host is under way.

The simulated device calls that a race, as it is one: the copy reads what is written. The engine
sees the change, and never uses that copy.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import ACCELERATORS, BACKENDS, make_backend
from torch import Tensor
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    OffloadConfig,
    PipelineOffloadManager,
    SavedTensorModifiedError,
    use_backend,
)
from pp_offload._core.keys import ChunkKey
from pp_offload._groups.split_backward import BackwardPass, SplitBackward

REAL = ["cpu", "cpu threads", *ACCELERATORS]


class SavesMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.cos()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.sin_().neg_().mul_(grad_output)


def loss_of(x: Tensor, is_on: bool) -> Tensor:
    h = x * 2
    for _ in range(4):
        with off_interface(is_on, h, "part") as h:
            y = SavesMemory.apply(h)
        h = off_interface.group_commit(y, name="part") * 1.5 if is_on else y * 1.5
    return h.sum()


def begin(manager: PipelineOffloadManager) -> Tensor:
    manager.reset()
    manager.init_model_chunk_offload_handler(None, None, 1)
    torch.manual_seed(3)
    return torch.randn(40, 50).to(manager.backend.device).requires_grad_()


@pytest.mark.parametrize("kind", REAL)
def test_gradients_are_equal(kind: str) -> None:
    with use_backend(make_backend(kind), config=OffloadConfig(min_offloaded_tensor_size=1)) as one:
        for _ in range(3):  # a step without a plan, and by one
            found = []
            for is_on in (False, True):
                x = begin(one)
                loss = loss_of(x, is_on)
                loss.backward()
                assert x.grad is not None
                found.append([loss.detach(), x.grad])
            assert same_bits(*found)
        assert one.statistics().bytes_offloaded > 0
        one.reset()
        assert_idle(one)


@pytest.mark.parametrize("kind", REAL)
def test_a_second_backward_is_right_or_an_error(kind: str) -> None:
    """Autograd raises. What came back from the host may be brought again, as it was saved."""
    with use_backend(make_backend(kind), config=OffloadConfig(min_offloaded_tensor_size=1)) as one:
        for _ in range(3):
            x = begin(one)
            loss_of(x, is_on=False).backward()
            expected, x.grad = x.grad, None
            assert expected is not None
            loss = loss_of(x, is_on=True)
            loss.backward(retain_graph=True)
            first, x.grad = x.grad, None
            try:
                loss.backward()
            except SavedTensorModifiedError:
                second = expected
            else:
                second = x.grad
            assert same_bits([first, second], [expected, expected])


class SpoilsMemory(SavesMemory):
    """Its backward may leave what it saved changed."""

    is_spoiling = False

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gradient = -x.sin() * grad_output
        if SpoilsMemory.is_spoiling:
            x.zero_()
        return gradient


def in_two_parts(manager: PipelineOffloadManager, is_spoiling: bool) -> list[Tensor]:
    """Gradients of an input, then of a weight, through one product that both parts use."""
    x = begin(manager)
    weight = torch.ones_like(x).requires_grad_()
    product = x * weight
    with off_interface(True, product, "part"):
        y = SpoilsMemory.apply(product)
    y = off_interface.group_commit(y, name="part")
    with off_interface(True, y, "part"):  # the last one stays on the device
        y = y.sin()
    y = off_interface.group_commit(y, name="part").sum()
    del product
    manager.backend.synchronize()
    manager.statistics()
    try:
        SpoilsMemory.is_spoiling = is_spoiling
        with manager.backward_pass(ChunkKey(0, 0), BackwardPass.INPUT):
            got = list(torch.autograd.grad(y, x, retain_graph=True))
    finally:
        SpoilsMemory.is_spoiling = False
    with manager.backward_pass(ChunkKey(0, 0), BackwardPass.WEIGHT):
        got += torch.autograd.grad(y, weight, retain_graph=True)
    return got


@pytest.mark.parametrize("kind", BACKENDS)
def test_what_the_first_part_changed_is_not_kept_for_the_second(kind: str) -> None:
    config = OffloadConfig(
        device_limit_bytes=None, min_offloaded_tensor_size=1, split_backward="keep"
    )
    with use_backend(make_backend(kind), config=config) as manager:
        chunks = frozenset({ChunkKey(0, 0)})
        manager.offloader.split = SplitBackward(chunks, is_keeping=True)
        for _ in range(2):  # from the second on, what both use is foreseen and kept
            expected = in_two_parts(manager, False)
        reloaded = manager.statistics().bytes_reloaded
        assert same_bits(in_two_parts(manager, True), expected)
        if kind == "cpu":
            nbytes = 40 * 50 * 4
            assert manager.statistics().bytes_reloaded - reloaded == 2 * nbytes, "brought again"
