"""A copy of a weight that layers save with every microbatch is no activation, and stays.

The modules of Transformer Engine here are stand-ins: they have the names that its layers and its
two generations of offload use, and compute on the CPU.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import on_two_backends
from helpers.products import PRODUCTS, Product
from helpers.scenarios import make_inputs
from helpers.sessions import gradients
from helpers.toy import same_bits
from torch import Tensor, nn

from pp_offload.backends import Backend

WIDTH, ROWS, LAYERS, MICROBATCHES = 8, 16, 2, 2
INPUT_BYTES = ROWS * WIDTH * 4
WEIGHT_BYTES = WIDTH * WIDTH


class Library(ModuleType):
    """Its own offload has a switch; while that is on, it flags what belongs to a weight."""

    def __init__(self, switch: str, off: object, flag: str) -> None:
        super().__init__("transformer_engine.pytorch.cpu_offload")
        self.switch, self.flag = switch, flag
        setattr(self, switch, off)

    def is_on(self) -> bool:
        return bool(getattr(self, self.switch))


LIBRARIES = {
    "version 1.x": ("CPUOffloadEnabled", False, "weight_offloading"),
    "as of version 2.10": ("OFFLOAD_SYNCHRONIZER", None, "_TE_do_not_offload"),
    "unknown": ("another_switch", False, "another_flag"),
}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = Library(*LIBRARIES[request.param])
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module
    assert not module.is_on(), "the switch is as it was"


class Quantized(torch.autograd.Function):
    """A linear layer that computes with a copy of the weight of eight bits, and saves it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, copy: Tensor, library: Any) -> Tensor:
        if library.is_on():
            setattr(copy, library.flag, True)
        ctx.save_for_backward(x, copy)
        return x @ copy.float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, copy = ctx.saved_tensors
        return grads[0] @ copy.float().T, x.T @ grads[0], None, None


class Linear(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        quantized = self.weight.detach().clamp(-1, 1) * 127
        self.workspaces = [quantized.to(torch.int8)]  # neither a parameter nor a buffer
        self.library = library

    def forward(self, x: Tensor) -> Tensor:
        return Quantized.apply(x, self.weight, self.workspaces[0], self.library)


def train(library: Any, product: Any) -> tuple[list[Tensor], list[int]]:
    """Gradients, and the bytes that each step offloads."""
    device = product.backend.device
    with device:
        torch.manual_seed(0)
        layers = [nn.Sequential(OrderedDict(mlp=Linear(library))) for _ in range(LAYERS)]
        net = nn.Sequential(OrderedDict(layers=nn.Sequential(*layers)))  # as products ask for
    net = product.inside(net)
    product.outside(net)
    moved = [0]
    for step in range(3):
        product.begin_step()
        losses = []
        for x in make_inputs(MICROBATCHES, step=step, length=ROWS, width=WIDTH, device=device):
            with product.forward():
                losses.append(net(x.requires_grad_()).sum())
        while losses:
            losses.pop().backward()
        statistics = product.statistics()
        moved.append(statistics.bytes_offloaded if statistics else 0)
    steps = [after - before for before, after in zip(moved, moved[1:], strict=False)]
    return gradients(*net.parameters()), steps


@on_two_backends
@pytest.mark.parametrize("name", ["context", "groups", "markers"])
def test_a_copy_of_a_weight_stays(name: str, library: Any, manager: Any, backend: Backend) -> None:
    expected, _ = train(library, Product(backend))
    grads, steps = train(library, PRODUCTS[name](backend))
    assert same_bits(grads, expected)
    first = LAYERS * MICROBATCHES * INPUT_BYTES
    later = first if name == "context" else first - INPUT_BYTES  # the last group stays
    if library.flag == "another_flag":  # the second microbatch shows that it is no activation
        first += LAYERS * WEIGHT_BYTES * (MICROBATCHES if name == "context" else 1)
    assert steps == [first, later, later]


@on_two_backends
def test_the_switch_is_restored_after_an_exception(
    library: Any, manager: Any, backend: Backend
) -> None:
    offload = PRODUCTS["context"](backend).forward()
    with suppress(RuntimeError), offload, offload:
        assert library.is_on() is (library.flag != "another_flag")
        raise RuntimeError
    assert not library.is_on()
    off, theirs = getattr(library, library.switch), object()
    setattr(library, library.switch, theirs)
    with offload:
        pass
    assert getattr(library, library.switch) is theirs
    setattr(library, library.switch, off)
