"""A second run starts from the buffers that the first one had, whatever the checkpoint calls, and
also where these were None or not registered yet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from conftest import on_two_backends
from helpers.checkpointed import apply
from helpers.toy import same_bits
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from pp_offload import OffloadModel, checkpoint, offload_layers, recompute_layers
from pp_offload.backends import Backend
from pp_offload.errors import OffloadError

WIDTH = 8


class Remembers(nn.Module):
    """Has a buffer that is None until the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.make()

    def make(self) -> None:
        self.register_buffer("state", None)

    def scale(self) -> Tensor | float:
        return 1.0 if self.state is None else 1.0 + self.state

    def keep(self, state: Tensor) -> None:
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        y = (self.linear(x) * self.scale()).tanh()
        self.keep(y.mean(0).detach())
        return y


class Table(Remembers):
    """Makes a longer table where it needs one, as rotary embeddings do."""

    def make(self) -> None:
        self.length = 0
        self.register_buffer("table", None, persistent=False)

    def scale(self) -> Tensor | float:
        if self.needed > self.length:
            self.length = self.needed
            self.table = torch.arange(self.length, device=self.linear.weight.device).cos()
        return self.table[: self.needed]

    def keep(self, state: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        self.needed = len(x)
        return (self.linear(x).T * self.scale()).T.tanh()


class Shares(Remembers):
    """Buffers that share memory, and one that is changed without a trace."""

    def make(self) -> None:
        self.register_buffer("state", torch.zeros(2, WIDTH))
        self.register_buffer("same", self.state)
        self.register_buffer("first", self.state[0])
        self.register_buffer("code", torch.zeros(2**13, WIDTH))
        self.register_buffer("last", torch.ones(WIDTH), persistent=False)
        self.register_buffer("counts", torch.zeros(2**14, dtype=torch.int64))

    def scale(self) -> Tensor | float:
        self.state += 1
        self.code.data += 1
        self.counts += 1
        return self.first + self.same[1] + self.code[0] + self.last.sin() + self.counts[0]

    def keep(self, state: Tensor) -> None:
        self.last = state


class Norms(nn.Module):
    """Each forward changes buffers that the next one reads, and random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.linear = spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(self.norm(x)).sin())


class Model(nn.Module):
    """A few of them."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(kind(), nn.Sequential(nn.Linear(WIDTH, WIDTH), kind()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


Call = Callable[[Tensor], Tensor]
Product = Callable[[Model, Backend], Call]


def called(make: Callable[[Model], Call] = lambda model: model, **options: Any) -> Product:
    """Of what a program may make of a model, with ``checkpoint``."""
    return lambda model, backend: partial(checkpoint, make(model), backend=backend, **options)


def by_operator(model: Model, backend: Backend) -> nn.Module:
    apply(model, "layers", "all, offload", backend)
    return model


def streamed(model: Model, backend: Backend) -> nn.Module:
    offload_layers(model, ["layers"], backend=backend)
    recompute_layers(model, ["layers.0", "layers.1"])
    return model


def in_slices(model: Model, backend: Backend) -> nn.Module:
    return OffloadModel(
        model.layers, backend.device, num_slices=2, checkpoint_activation=True, backend=backend
    )


GLOBAL: Any = None


def with_global(x: Tensor) -> Tensor:
    return GLOBAL(x)


def by_global(model: Model) -> Call:
    globals()["GLOBAL"] = model
    return with_global


def decorated(function: Call) -> Call:
    return wraps(function)(lambda x: function(x))


CALLS: dict[str, Product] = {
    "method": called(lambda model: model.forward),
    "partial that is given it": called(lambda model: partial(Model.forward, model)),
    "decorated lambda over a dict": called(
        lambda model: decorated(lambda x, a={"b": [model]}: a["b"][0](x))  # noqa: B006
    ),
    "closure": called(lambda model: lambda x: model(x)),
    "default": called(lambda model: lambda x, given=model: given(x)),
    "global": called(by_global),
}
PRODUCTS: dict[str, Product] = {
    "call": called(),
    "call, reentrant": called(use_reentrant=True),
    "by operator": by_operator,
    "recomputed layers on the host": streamed,
    "slices": in_slices,
}
ON_THE_HOST = {"recomputed layers on the host", "slices"}
"""Products whose parameters stay there: shared buffers would be others."""


def steps(
    kind: Callable[[], nn.Module],
    product: str,
    backend: Backend,
    order: tuple[int, ...],
    is_on: bool,
) -> tuple[list[Tensor], list[str]]:
    """Two steps of microbatches in flight, which go back in some order when the model is in
    evaluation: all numbers, and the names of the buffers.

    The input of the first needs no gradient: PyTorch's older checkpoint drops those of parameters
    then, and ours does not.
    """
    torch.manual_seed(5)
    model = Model(kind)
    if product not in ON_THE_HOST or not is_on:
        model.to(backend.device)
    call = (PRODUCTS | CALLS)[product](model, backend) if is_on else model
    results = []
    for _ in range(2):
        model.train()
        inputs = [torch.randn(6 + number, WIDTH).to(backend.device) for number in order]
        for number, x in enumerate(inputs):
            x.requires_grad_(number > 0)
        losses = [call(x).square().sum() for x in inputs]
        model.eval()
        for number in order:
            losses[number].backward()
        results += [*losses, *(x.grad for x in inputs)]
    results += [*(p.grad for p in model.parameters()), *model.buffers()]
    names = [name.replace("_checkpoint_wrapped_module.", "") for name, _ in model.named_buffers()]
    return [tensor.detach().cpu() for tensor in results if tensor is not None], names


@pytest.mark.covering(1)
@pytest.mark.parametrize("order", [(0,), (1, 2, 0)], ids=str)
@on_two_backends
@pytest.mark.parametrize(
    ("kind", "product"),
    [
        *((Norms, product) for product in CALLS),
        *(
            (kind, product)
            for kind in (Remembers, Table, Shares, Norms)
            for product in PRODUCTS
            if kind is not Shares or product not in ON_THE_HOST
        ),
    ],
)
def test_buffers_change_once_whatever_is_called(
    kind: type[nn.Module], product: str, active: Backend, order: tuple[int, ...]
) -> None:
    """Also buffers that were not there before; and a norm does in backward what it did before."""
    results, names = steps(kind, product, active, order, is_on=True)
    expected, expected_names = steps(kind, product, active, order, is_on=False)
    assert same_bits(results, expected)
    assert names == expected_names


class Masked(nn.Module):
    """Has a large buffer of integers, which is not copied."""

    def __init__(self, *, changes: bool) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(2**7, 2**7, dtype=torch.int64))
        self.changes = changes

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.mask[0]).sin()
        if self.changes:
            self.mask += 1
        return y


def test_a_large_buffer_stays_or_is_an_error_where_it_changes() -> None:
    x = torch.ones(2**7, requires_grad=True)
    checkpoint(Masked(changes=False), x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2**7).cos())
    y = checkpoint(Masked(changes=True), x)
    with pytest.raises(OffloadError, match="buffer 'mask' of a Masked was changed .* self.mask"):
        y.sum().backward()
