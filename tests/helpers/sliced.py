"""Sequentials of all kinds, and programs that train them, for the plain model and a sliced one."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.toy import moved, same_bits
from pp_offload import OffloadModel, offload_layers
from pp_offload._slices.cache import CacheFigures
from pp_offload.backends import Backend

WIDTH = 8

ROWS = 36
"""Of a batch; what goes into a slice is large enough to leave the device."""


EXACT_LR = 2**-6
"""A product with a power of two is not rounded, so a GPU steps to the bits that a CPU does."""


class Square(nn.Linear):
    """As many features out as in."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class Fork(Square):
    """Gives a dict of a tensor and a tuple."""

    def forward(self, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
        return {"a": super().forward(x).sin(), "rest": (x.cos(), 3)}


class Merge(nn.Module):
    """Takes what :class:`Fork` gives; uses its weight several times and in several views."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(0, 3))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, parts: dict[str, Any]) -> Tensor:
        w, x, (y, number) = self.weight, parts["a"], parts["rest"]
        x = torch.tanh(x @ w + y @ w.t())
        return x * w[1] * number + w[2:4].exp().sum() + w.square().mean()


class Complex(nn.Module):
    """Saves conjugated, negated and real views of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight.conj() * self.weight
        return (y * torch.view_as_real(self.weight)[:, 1]).abs() + x * self.weight.conj().imag


class Inside(Square):
    """Checkpoints what is inside of it, as layers of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self._gradient_checkpointing_func: Any = lambda inside, x: inside(x)

    def forward(self, x: Tensor) -> Tensor:
        return self._gradient_checkpointing_func(super().forward, x)


class Inner(Square):
    """Runs a backward in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            y = torch.tanh(super().forward(x))
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope


class Asks(nn.Module):
    """Asks for the gradient of one parameter in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Square(), Square()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.enable_grad():
            inner = self.second(hidden).square().sum()
            (gradient,) = torch.autograd.grad(inner, self.second.weight)
        return hidden + gradient.mean()


class Stack(nn.Module):
    """Calls its layers in any order, and by ``run``, with a head that is no layer."""

    def __init__(
        self,
        layers: Iterable[nn.Module],
        order: list[int] | None = None,
        run: Callable[..., Tensor] = lambda layer, x: layer(x),
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = Square()
        self.order = list(range(len(self.layers))) if order is None else order
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = torch.tanh(self.run(self.layers[number], x))
        return self.head(x)  # type: ignore[no-any-return]


def mlp(depth: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(Square(), nn.Tanh()) for _ in range(depth)))


def uneven() -> nn.Sequential:
    """With layers that have no parameters at all, at both ends and in the middle."""
    big, small = nn.Linear(WIDTH, 5 * WIDTH), nn.Linear(5 * WIDTH, WIDTH, bias=False)
    return nn.Sequential(
        nn.Identity(), big, nn.ReLU(), nn.Sigmoid(), small, nn.Tanh(), nn.Sigmoid()
    )


def norms() -> nn.Sequential:
    layers = [Square(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)]
    layers += [Square(), nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU()]
    return nn.Sequential(*layers)


def across() -> nn.Sequential:
    """A weight that the first and the last slice share."""
    model = mlp()
    model[5][0].weight = model[0][0].weight
    return model


def within() -> nn.Sequential:
    """A weight that two layers of a slice share, and one layer that is there twice."""
    model = mlp()
    model[1][0].weight = model[0][0].weight
    return nn.Sequential(*model[:5], model[4])


def frozen() -> nn.Sequential:
    """The first and the last slice are frozen, and half of the one in between."""
    model = mlp()
    for parameter in (*model[0:2].parameters(), *model[4:].parameters(), model[3][0].weight):
        parameter.requires_grad_(False)
    return model


def named() -> nn.Sequential:
    """Layers by name; structures between them."""
    parts = {"stem": Square(), "fork": Fork(), "merge": Merge(), "z": nn.Tanh()}
    return nn.Sequential(OrderedDict(parts))


def images() -> nn.Sequential:
    model = nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 3, 2, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 2)
    )
    return model.to(memory_format=torch.channels_last)


def inner() -> nn.Sequential:
    return nn.Sequential(*mlp(3), Inner(), nn.ReLU(inplace=True), *mlp(2))


def asks() -> nn.Sequential:
    return nn.Sequential(Asks(), *mlp(2), Asks())


def waves() -> nn.Sequential:
    return nn.Sequential(Square(), Complex(), Square())


def parametrized() -> nn.Sequential:
    model = mlp(4)
    nn.utils.parametrizations.weight_norm(model[1][0])
    nn.utils.parametrizations.spectral_norm(model[2][0])
    nn.utils.parametrizations.orthogonal(model[3][0])
    return model


MODELS: list[Callable[[], nn.Sequential]] = [
    *(mlp, uneven, norms, across, within, frozen, named, images, waves, parametrized, inner, asks),
]
"""Each takes (batch, WIDTH)."""

REPEATED = [within, named, waves, parametrized]
"""Those with a parameter that is used several times in a slice."""

Offloaded = tuple[nn.Module, CacheFigures]
"""What is called, and what has the figures."""


def as_layers(layers: nn.Sequential, backend: Backend, **options: Any) -> Offloaded:
    """By ``offload_layers``, each layer for itself."""
    model = nn.Sequential(layers)
    return model, offload_layers(model, "0", backend=backend, **options)


def as_slices(layers: nn.Sequential, backend: Backend, **options: Any) -> Offloaded:
    """By ``OffloadModel``."""
    model = OffloadModel(layers, backend.device, backend=backend, **options)
    return model, model


def run_again(layers: nn.Sequential, backend: Backend, **options: Any) -> Offloaded:
    """By ``OffloadModel``, each slice once more in backward."""
    return as_slices(layers, backend, checkpoint_activation=True, **options)


Offload = Callable[..., Offloaded]

each_way = pytest.mark.parametrize("offload", [as_layers, as_slices, run_again])
both_ways = pytest.mark.parametrize("offload", [as_layers, as_slices])


def plain_and_offloaded(
    layers: nn.Sequential, offload: Offload, backend: Backend, **options: Any
) -> tuple[nn.Module, nn.Module, CacheFigures]:
    """The layers on the device, and their equal on the host, with figures."""
    plain = moved(copy.deepcopy(layers), backend.device)
    return plain, *offload(layers, backend, **options)


def inputs_for(
    device: torch.device, num: int = 1, step: int = 0, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Leaves that want gradients, the same for the same step."""
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(num)]
    return [x.to(device, dtype).requires_grad_() for x in drawn]


def input_for(backend: Backend, step: int = 0) -> Tensor:
    """One leaf."""
    (x,) = inputs_for(backend.device, step=step)
    return x


def state(model: nn.Module) -> list[Tensor]:
    """Parameters, gradients and buffers, on the host."""
    tensors = [p.detach() for p in model.parameters()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    return [tensor.cpu().clone() for tensor in (*tensors, *model.buffers())]


Call = Callable[[Tensor], Tensor]
Order = Callable[[Call, list[Tensor]], list[Tensor]]


def one_by_one(call: Call, leaves: list[Tensor]) -> list[Tensor]:
    losses = []
    for x in leaves:
        losses.append(call(x).square().mean())
        losses[-1].backward()
    return losses


def first_in_first_out(call: Call, leaves: list[Tensor]) -> list[Tensor]:
    losses = [call(x).square().mean() for x in leaves]
    for loss in losses:
        loss.backward()
    return losses


def last_in_first_out(call: Call, leaves: list[Tensor]) -> list[Tensor]:
    losses = [call(x).square().mean() for x in leaves]
    for loss in reversed(losses):
        loss.backward()
    return losses


def together(call: Call, leaves: list[Tensor]) -> list[Tensor]:
    losses = [call(x).square().mean() for x in leaves]
    torch.stack(losses).sum().backward()
    return losses


def evaluated_between(call: Call, leaves: list[Tensor]) -> list[Tensor]:
    losses = []
    for x in leaves:
        losses.append(call(x).square().mean())
        with torch.no_grad():
            losses.append(call(x.flip(0)).sum())
        losses[-2].backward()
    return losses


def twice(call: Call, leaves: list[Tensor]) -> list[Tensor]:
    losses = [call(x).square().mean() for x in leaves]
    for loss in losses:
        loss.backward(retain_graph=True)
    for loss in reversed(losses):
        loss.backward()
    return losses


def only_some(call: Call, leaves: list[Tensor]) -> list[Tensor]:
    """A graph is dropped; of another only the inputs' gradients are asked for."""
    losses = [call(x).square().mean() for x in leaves]
    del losses[0]
    (leaves[-1].grad,) = torch.autograd.grad(losses[-1], leaves[-1], retain_graph=True)
    for loss in losses:
        loss.backward()
    return losses


ORDERS: list[Order] = [
    *(one_by_one, first_in_first_out, together, evaluated_between, twice, only_some),
    last_in_first_out,
]


def train(
    model: nn.Module,
    order: Order,
    device: torch.device,
    *,
    call: Call | None = None,
    steps: int = 3,
) -> list[Tensor]:
    """Losses, gradients of inputs, and the state after a few steps, on the host."""
    optimizer = torch.optim.SGD(model.parameters(), lr=EXACT_LR)
    results = []
    for step in range(steps):
        torch.manual_seed(step)
        leaves = inputs_for(device, 3, step)
        results += order(call or model, leaves)
        results += [x.grad for x in leaves if x.grad is not None]
        optimizer.step()
        if step < steps - 1:
            optimizer.zero_grad()
    return [tensor.detach().cpu() for tensor in results] + state(model)


def same_training(plain: nn.Module, model: nn.Module, backend: Backend, **options: Any) -> bool:
    """Whether steps of both give the same bits."""
    results = [train(trained, one_by_one, backend.device, **options) for trained in (plain, model)]
    return same_bits(*results)
