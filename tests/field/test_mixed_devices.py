"""F42: a saved tensor comes back on the device it was saved on, whatever else its group saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from field_checks import make_inputs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload.backends import CpuBackend

pytestmark = pytest.mark.field("F42")

META, CPU = torch.device("meta"), torch.device("cpu")


class Shows(torch.autograd.Function):
    """x times two; backward shows the tensors that were saved along."""

    seen: list[Tensor] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        Shows.seen.extend(ctx.saved_tensors)
        return gradient * 2, *(None for _ in ctx.saved_tensors)


def through_group(make: Callable[[], list[Tensor]], device: torch.device) -> list[Tensor]:
    """What comes back of tensors saved in one group; nobody else refers to them."""
    off_interface.reset()
    off_interface.init_chunk_handler(None, None, 1)
    h = torch.ones(2, device=device, requires_grad=True) * 1
    with off_interface(True, h, "core") as h:
        y = Shows.apply(h, *make())
    off_interface.group_commit(y, name="core").sum().backward()
    seen = list(Shows.seen)
    Shows.seen.clear()
    return seen


def mixed(device: torch.device) -> list[Tensor]:
    """Of three devices, or two where the device is the CPU; the last is not the backend's."""
    inputs = make_inputs(3, device=device)
    meta = torch.empty(4, 6, device=META)
    return [inputs[0], meta, inputs[1], torch.linspace(0, 1, 24).view(4, 6), inputs[2], meta.t()]


def test_mixed_saves(manager: PipelineOffloadManager) -> None:
    device = manager.backend.device
    expected = mixed(device)
    seen = through_group(lambda: mixed(device), device)
    for got, wanted in zip(seen, expected, strict=True):
        assert got.device == wanted.device
        assert (got.shape, got.stride(), got.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
        assert wanted.is_meta or same_bits([got], [wanted])
    on_device = sum(t.nbytes for t in expected if t.device == device)
    assert manager.statistics().bytes_offloaded == on_device
    del seen, got
    assert_idle(manager)


def test_meta_gradients_stay_meta(manager: PipelineOffloadManager) -> None:
    """A whole computation on meta tensors beside the real one, in the same groups."""
    device = manager.backend.device

    def run(is_on: bool, step: int) -> tuple[list[Tensor], Tensor]:
        x = make_inputs(1, step=step, device=device)[0].requires_grad_()
        shadow = torch.empty(4, 6, device=META, requires_grad=True)
        if is_on:
            off_interface.reset()
            off_interface.init_chunk_handler(None, None, 1)
        h, shape = x * 2, shadow * 2
        for _ in range(2):
            with off_interface(is_on, h, "core") as h:
                h, shape = h.sin().exp().tanh(), shape.sin().exp().tanh()
            if is_on:
                h, shape = off_interface.group_commit((h, shape), name="core")
        h.sum().backward()
        shape.sum().backward()
        assert shadow.grad is not None
        return [h.detach(), x.grad], shadow.grad

    for step in range(2):
        got, shadow = run(True, step)
        assert same_bits(got, run(False, step)[0])
        assert shadow.is_meta and shadow.shape == (4, 6)
        assert_idle(manager)


class OfAnotherDevice(CpuBackend):
    """As on a machine whose accelerator is not where these tensors are."""

    def __init__(self) -> None:
        super().__init__()
        self.device = META


def test_cpu_tensors_stay_on_the_cpu() -> None:
    """They are not the backend's to move."""
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with use_backend(OfAnotherDevice(), config=config) as manager:
        expected = make_inputs(3)
        seen = through_group(lambda: make_inputs(3), CPU)
        assert {got.device for got in seen} == {CPU}
        assert same_bits(seen, expected)
        assert manager.statistics().bytes_offloaded == 0


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_fake_tensors_stay_fake(manager: PipelineOffloadManager, where: str) -> None:
    """Of no device at all, whatever they say; a real one is saved in the same group."""
    device = manager.backend.device
    with FakeTensorMode():
        fakes = [torch.empty(4, 6, device=where), torch.empty(6, 4, device=where).t()]
    (real,) = make_inputs(1, device=device)
    seen = through_group(lambda: [fakes[0], real.clone(), fakes[1]], device)
    for got, fake in zip((seen[0], seen[2]), fakes, strict=True):
        assert isinstance(got, FakeTensor)
        assert (got.device, got.shape, got.stride()) == (fake.device, fake.shape, fake.stride())
    assert same_bits([seen[1]], [real])
    assert manager.statistics().bytes_offloaded == real.nbytes
