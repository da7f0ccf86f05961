"""Sequentials of all kinds, and programs that train them, for the plain model and a sliced one."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from conftest import make_backend, skip_on_emulated
from torch import Tensor, nn
from toy import moved

from pp_offload.backends import Backend
from pp_offload.offload_model import OffloadModel

WIDTH = 8

ROWS = 36
"""Of a batch; what goes into a slice is large enough to leave the device."""


class Fork(nn.Module):
    """Gives a dict of a tensor and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"a": self.linear(x).sin(), "rest": (x.cos(), 3)}


class Merge(nn.Module):
    """Takes what :class:`Fork` gives; uses its weight several times and in several views."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(3))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, parts: dict[str, Any]) -> Tensor:
        x, (y, number) = parts["a"], parts["rest"]
        x = torch.tanh(x @ self.weight + y @ self.weight.t())
        return (
            x * self.weight[1] * number + self.weight[2:4].exp().sum() + self.weight.square().mean()
        )


class Complex(nn.Module):
    """Saves conjugated and real views of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight.conj() * self.weight
        return (y * torch.view_as_real(self.weight)[:, 1]).abs() + x * self.weight.real


def mlp(depth: int = 6) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers)


def uneven() -> nn.Sequential:
    """With layers that have no parameters at all, at both ends and in the middle."""
    big, small = nn.Linear(WIDTH, 5 * WIDTH), nn.Linear(5 * WIDTH, WIDTH, bias=False)
    return nn.Sequential(
        nn.Identity(), big, nn.ReLU(), nn.Sigmoid(), small, nn.Tanh(), nn.Sigmoid()
    )


def norms() -> nn.Sequential:
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)]
    layers += [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU()]
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
    layers = list(model)
    return nn.Sequential(*layers[:5], layers[4])


def frozen() -> nn.Sequential:
    """The first and the last slice are frozen, and half of the one in between."""
    model = mlp()
    for parameter in (*model[0:2].parameters(), *model[4:].parameters(), model[3][0].weight):
        parameter.requires_grad_(False)
    return model


def named() -> nn.Sequential:
    """Layers by name; structures between them."""
    parts = {"stem": nn.Linear(WIDTH, WIDTH), "fork": Fork(), "merge": Merge(), "z": nn.Tanh()}
    return nn.Sequential(OrderedDict(parts), *[])


def images() -> nn.Sequential:
    model = nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 3, 2, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 2)
    )
    return model.to(memory_format=torch.channels_last)


class Inner(nn.Module):
    """Runs a backward in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            y = torch.tanh(self.linear(x))
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope


def inner() -> nn.Sequential:
    return nn.Sequential(*mlp(3), Inner(), nn.ReLU(inplace=True), *mlp(2))


def waves() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Complex(), nn.Linear(WIDTH, WIDTH))


def recurrent() -> nn.Sequential:
    last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Unflatten(1, (1, WIDTH)))
    return nn.Sequential(last, nn.LSTM(WIDTH, WIDTH, batch_first=True), _First(), nn.Tanh())


class _First(nn.Module):
    def forward(self, pair: tuple[Tensor, Any]) -> Tensor:
        return pair[0]


def parametrized() -> nn.Sequential:
    model = mlp(4)
    nn.utils.parametrizations.weight_norm(model[1][0])
    nn.utils.parametrizations.spectral_norm(model[2][0])
    nn.utils.parametrizations.orthogonal(model[3][0])
    return model


MODELS: list[Callable[[], nn.Sequential]] = [
    *(mlp, uneven, norms, across, within, frozen, named, images, waves, recurrent, parametrized),
    inner,
]
"""Each takes (batch, WIDTH)."""

REPEATED = [within, named, waves, parametrized]
"""Those with a parameter that is used several times in a slice."""


@contextmanager
def pair(
    make: Callable[[], nn.Sequential], kind: str, dtype: torch.dtype = torch.float32, **options: Any
) -> Iterator[tuple[nn.Sequential, OffloadModel]]:
    """The plain model on the device, and its equal on the host, in slices."""
    backend: Backend = make_backend(kind)
    if make is recurrent:
        skip_on_emulated(backend, "PyTorch has no LSTM for such a device but a kernel of its own")
    if make is norms and dtype is torch.bfloat16:
        skip_on_emulated(backend, "PyTorch's kernels of the CPU want other statistics in backward")
    with backend.activate():
        torch.manual_seed(1)
        plain = make()
        if dtype is not torch.float32:
            plain.to(dtype)
        sliced = copy.deepcopy(plain)
        yield (
            moved(plain, backend.device),
            OffloadModel(sliced, backend.device, backend=backend, **options),
        )


def device_of(model: nn.Module) -> torch.device:
    """Where it computes."""
    if isinstance(model, OffloadModel):
        return model._cache.copies.backend.device
    return next(model.parameters()).device


def inputs_for(
    model: nn.Module, num: int, step: int = 0, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Leaves that want gradients, the same for the same step."""
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(num)]
    return [x.to(device_of(model), dtype).requires_grad_() for x in drawn]


def state(model: nn.Module) -> list[Tensor]:
    """Parameters, gradients and buffers, on the host."""
    found = [p.detach() for p in model.parameters()]
    found += [p.grad for p in model.parameters() if p.grad is not None]
    return [one.cpu().clone() for one in (*found, *model.buffers())]


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
    *(one_by_one, first_in_first_out, last_in_first_out, together),
    *(evaluated_between, twice, only_some),
]


def train(
    model: nn.Module,
    order: Order,
    make_optimizer: Callable[[Any], OnHost],
    *,
    call: Call | None = None,
    steps: int = 3,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Losses, gradients of inputs, and the state after a few steps, on the host."""
    optimizer = make_optimizer(model.parameters())
    results = []
    for step in range(steps):
        torch.manual_seed(step)
        leaves = inputs_for(model, 3, step, dtype)
        results += order(call or model, leaves)
        results += [x.grad for x in leaves if x.grad is not None]
        optimizer.step()
        if step < steps - 1:
            optimizer.zero_grad()
    return [one.detach().cpu() for one in results] + state(model)


def trained(model: nn.Module, backend: Backend, width: int) -> list[Tensor]:
    """Losses of a few steps on batches of so many features, and the state behind them."""
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, width, generator=torch.Generator().manual_seed(step))
        loss = model(x.to(backend.device)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return losses + state(model)


class OnHost:
    """An optimizer that steps on the host alone: a GPU rounds unlike a CPU.

    A parameter on a device has a copy on the host, which is stepped in its place.

    Args:
        parameters: Some may be on the host already.
        make: Makes the optimizer.
    """

    def __init__(
        self, parameters: Iterable[Tensor], make: Callable[..., torch.optim.Optimizer]
    ) -> None:
        wanted = [p for p in parameters if p.requires_grad]
        self._pairs = [(p, p if p.is_cpu else p.detach().cpu()) for p in wanted]
        self._optimizer = make([host for _, host in self._pairs])

    def zero_grad(self) -> None:
        for p, _ in self._pairs:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        copies = [(p, host) for p, host in self._pairs if p is not host]
        for p, host in copies:
            host.grad = None if p.grad is None else p.grad.cpu()
        self._optimizer.step()
        for p, host in copies:
            p.copy_(host)


def sgd(parameters: Iterable[Tensor]) -> OnHost:
    return OnHost(parameters, partial(torch.optim.SGD, lr=0.1, momentum=0.9))


def adamw(parameters: Iterable[Tensor]) -> OnHost:
    return OnHost(parameters, partial(torch.optim.AdamW, lr=0.01))
