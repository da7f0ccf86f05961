"""Tensors and programs of every kind there is in training, in groups: the same bits as without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import on_two_backends
from helpers.sessions import begin_step, drawn, gradients, group
from helpers.toy import assert_idle, same_bits
from torch import Tensor, nn

from pp_offload import PipelineOffloadManager

Program = Callable[[Tensor, nn.ParameterDict], Tensor]


def autocast(x: Tensor, weights: nn.ParameterDict) -> Tensor:
    """Products in bfloat16; the weights' casts are cached while the context is open."""
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        y = torch.tanh(x @ weights["square"])
        y = torch.softmax(y @ weights["square"].t(), -1)
        return (y @ weights["square"]).float()


def channels_last(x: Tensor, weights: nn.ParameterDict) -> Tensor:
    image = x.reshape(1, 4, 3, 2).contiguous(memory_format=torch.channels_last)
    kernel = weights["kernel"].contiguous(memory_format=torch.channels_last)
    y = torch.nn.functional.conv2d(image, kernel, padding=1).relu()
    y = torch.nn.functional.max_pool2d(y, 2, stride=1, padding=1)
    return y.sigmoid()[:, :, :3, :2].reshape(4, 6)


def complex_numbers(x: Tensor, weights: nn.ParameterDict) -> Tensor:
    """A conjugate is a lazy flag on the same bytes."""
    z = torch.fft.fft(x, dim=1) * torch.complex(x.cos(), x.sin())
    y = (z * z.conj() + (z.conj() / 8).sin() * z.real).imag * z.abs()
    return (y + torch.view_as_real(z).prod(-1) + z.imag.sin() * z.angle()).tanh()


def indices_and_masks(x: Tensor, weights: nn.ParameterDict) -> Tensor:
    values, index = x.topk(3, dim=1)
    picked = weights["square"][index.flatten()].view(4, 3, 6) * values[..., None]
    y = picked.sum(1).masked_fill(x > 0.5, 0.25)
    y = torch.nn.functional.dropout(y, 0.5)
    return y.scatter_add(1, index, values) + x.cumsum(1).gather(1, index.flip(1)).sum()


def attention(x: Tensor, weights: nn.ParameterDict) -> Tensor:
    """Three views of one product, and an operator with outputs of its own for backward."""
    q, k, v = (x @ weights["square"]).view(1, 4, 3, 2).transpose(1, 2).unbind(1)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    y = y + torch.nn.functional.layer_norm(y, (2,))
    return y.repeat(1, 1, 3).view(4, 6) * x


PROGRAMS = [
    autocast,
    channels_last,
    complex_numbers,
    indices_and_masks,
    attention,
]


def make_weights(device: torch.device) -> nn.ParameterDict:
    torch.manual_seed(7)
    shapes = {"row": (6,), "square": (6, 6), "kernel": (4, 4, 3, 3)}
    values = {name: torch.randn(shape) / 2 for name, shape in shapes.items()}
    return nn.ParameterDict({name: nn.Parameter(t.to(device)) for name, t in values.items()})


@on_two_backends
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_are_equal(manager: PipelineOffloadManager, program: Program) -> None:
    weights = make_weights(manager.backend.device)

    def run(is_on: bool) -> list[Tensor]:
        torch.manual_seed(1)
        x = drawn(4, 6).to(manager.backend.device).requires_grad_()
        y = x * 1
        for _ in range(2):
            y = group(y, lambda h: program(h, weights), is_on)
        y.square().mean().backward()
        return [y.detach(), *gradients(x, *weights.parameters())]

    expected = run(False)
    assert all(torch.isfinite(result).all() for result in expected)
    for step in range(2):
        begin_step()
        assert same_bits(run(True), expected), step
        assert_idle(manager)
    assert manager.statistics().bytes_offloaded > 0
