"""F11: a model in slices trains as the whole one, whatever its layers are and how it is called.

Two forwards before their backwards, gradients of the input, a last dimension of one, batch norm,
no gradients at all, random numbers, several inputs, integers, shared and frozen parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import BACKENDS, make_backend
from torch import Tensor, nn
from toy import same_bits

from pp_offload.offload_model import OffloadModel

Sliced = Callable[[nn.Sequential], nn.Module]
WIDTH = 6


def linear(width: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, width)


def x_for(device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, WIDTH, generator=generator).to(device).requires_grad_()


def trained(model: nn.Module, inputs: list[tuple[Tensor, ...]], seed: int = 3) -> list[Tensor]:
    """All forwards, then all backwards; losses, outputs, gradients, buffers."""
    torch.manual_seed(seed)
    outputs = [model(*one) for one in inputs]
    for output in outputs:
        output.square().sum().backward()
    found = [one.detach() for one in outputs]
    found += [x.grad for one in inputs for x in one if x.grad is not None]
    found += [p.grad for p in model.parameters() if p.grad is not None]
    return [one.cpu() for one in (*found, *model.buffers())]


def equal(plain: nn.Sequential, sliced: Sliced, inputs: Callable[[], list[Any]]) -> bool:
    """Two steps of a model and of its copy in slices."""
    model = sliced(copy.deepcopy(plain))
    return all(same_bits(trained(model, inputs()), trained(plain, inputs())) for _ in range(2))


def two_forwards_two_backwards(sliced: Sliced, device: torch.device) -> bool:
    plain = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh()).to(device)
    return equal(plain, sliced, lambda: [(x_for(device, seed).detach(),) for seed in range(2)])


def gradient_of_the_input(sliced: Sliced, device: torch.device) -> bool:
    plain = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh()).to(device)
    return equal(plain, sliced, lambda: [(x_for(device),)])


def last_dimension_of_one(sliced: Sliced, device: torch.device) -> bool:
    plain = nn.Sequential(linear(), nn.Tanh(), linear(1)).to(device)
    return equal(plain, sliced, lambda: [(x_for(device).detach(),)])


def batch_norm_counts_once(sliced: Sliced, device: torch.device) -> bool:
    plain = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear(), nn.Tanh()).to(device)
    return equal(plain, sliced, lambda: [(x_for(device).detach(),)])


def nothing_without_gradients(sliced: Sliced, device: torch.device) -> bool:
    plain = nn.Sequential(linear(), nn.Tanh(), linear()).to(device)
    model = sliced(copy.deepcopy(plain))
    with torch.no_grad():
        y = model(x_for(device))
    return not y.requires_grad and torch.equal(y, plain(x_for(device)))


def random_numbers_of_the_device(sliced: Sliced, device: torch.device) -> bool:
    plain = nn.Sequential(linear(), nn.Dropout(0.4), linear(), nn.Dropout(0.4)).to(device)
    return equal(plain, sliced, lambda: [(x_for(device).detach(),)])


def several_inputs(sliced: Sliced, device: torch.device) -> bool:
    """The first layer takes them; of a plain Sequential nothing can."""
    first, rest = nn.Bilinear(WIDTH, WIDTH, WIDTH), nn.Sequential(nn.Tanh(), linear())
    plain = nn.ModuleList([first, *rest]).to(device)
    model = sliced(copy.deepcopy(nn.Sequential(*plain)))
    results = []
    for one, call in ((plain, lambda x, y: rest(first(x, y))), (model, model)):
        x, y = x_for(device), x_for(device, 1)
        call(x, y).square().sum().backward()
        results.append([g.cpu() for g in (x.grad, y.grad, *(p.grad for p in one.parameters()))])
    return same_bits(*results)


class Swap(nn.Module):
    """Takes a tuple, gives a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = pair
        return torch.tanh(self.linear(y)), x


class Sum(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


def tuples_between_layers(sliced: Sliced, device: torch.device) -> bool:
    plain = nn.Sequential(Swap(), Swap(), Swap(), Sum()).to(device)
    model = sliced(copy.deepcopy(plain))
    results = []
    for one in (plain, model):
        x, y = x_for(device), x_for(device, 1)
        one((x, y)).square().sum().backward()
        results.append([g.cpu() for g in (x.grad, y.grad, *(p.grad for p in one.parameters()))])
    return same_bits(*results)


def integers(sliced: Sliced, device: torch.device) -> bool:
    plain = nn.Sequential(nn.Embedding(9, WIDTH), nn.Tanh(), linear()).to(device)
    tokens = torch.tensor([[1, 8], [3, 1]], device=device)
    return equal(plain, sliced, lambda: [(tokens,), (tokens.flip(0),)])


def shared_parameters(sliced: Sliced, device: torch.device) -> bool:
    plain = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh(), linear()).to(device)
    plain[4].weight = plain[0].weight
    return equal(plain, sliced, lambda: [(x_for(device),)])


def frozen_parameters(sliced: Sliced, device: torch.device) -> bool:
    plain = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh(), linear()).to(device)
    for parameter in (*plain[4].parameters(), plain[0].weight):
        parameter.requires_grad_(False)
    return equal(plain, sliced, lambda: [(x_for(device),)])


CHECKS = [
    *(two_forwards_two_backwards, gradient_of_the_input, last_dimension_of_one),
    *(batch_norm_counts_once, nothing_without_gradients, random_numbers_of_the_device),
    *(several_inputs, tuples_between_layers, integers, shared_parameters, frozen_parameters),
]


@pytest.mark.field("F11")
@pytest.mark.covering(2)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("num_slices", [1, 2, 3])
@pytest.mark.parametrize("kind", BACKENDS)
def test_as_the_whole_model(kind: str, num_slices: int, again: bool, check) -> None:
    backend = make_backend(kind)
    with backend.activate():
        sliced = partial(
            OffloadModel,
            device=backend.device,
            backend=backend,
            num_slices=num_slices,
            checkpoint_activation=again,
        )
        torch.manual_seed(1)
        assert check(sliced, backend.device)
