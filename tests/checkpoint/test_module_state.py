"""A second run starts from the buffers that the first one had, also where these were None, not
registered yet, or without a shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from checkpointed import WAYS, apply
from conftest import ACCELERATORS, make_backend, skip_on_emulated
from torch import Tensor, nn
from toy import same_bits

from pp_offload import (
    OffloadModel,
    checkpoint,
    checkpoint_function,
    checkpoint_wrapper,
    offload_layers,
    recompute_layers,
)
from pp_offload.backends import Backend

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


class Registers(Remembers):
    """Has no such buffer until then."""

    def make(self) -> None:
        pass

    def scale(self) -> Tensor | float:
        return 1.0 + self.state if hasattr(self, "state") else 1.0

    def keep(self, state: Tensor) -> None:
        self.register_buffer("state", state)


class NotSaved(Registers):
    """One that is not in the state dict."""

    def keep(self, state: Tensor) -> None:
        self.register_buffer("state", state, persistent=False)


class EveryOther(Remembers):
    """Forgets it in the next forward."""

    def keep(self, state: Tensor) -> None:
        self.state = state if self.state is None else None


class Deletes(Registers):
    """Deletes it in the next forward, and puts another behind those that are there."""

    def make(self) -> None:
        self.register_buffer("first", torch.zeros(WIDTH))
        self.register_buffer("last", torch.ones(WIDTH))

    def keep(self, state: Tensor) -> None:
        self.first = self.last + state
        if hasattr(self, "state"):
            del self.state
            del self.last
            self.register_buffer("last", state)
        else:
            super().keep(state)


class Numbers(Registers):
    """Registers one more in each forward, and reads the sum of all."""

    def scale(self) -> Tensor | float:
        return 1.0 + sum(self._buffers.values())

    def keep(self, state: Tensor) -> None:
        self.register_buffer(f"state{len(self._buffers)}", state)


class Flagged(Registers):
    """Knows by a flag whether it is there."""

    def scale(self) -> Tensor | float:
        return 1.0 + self.state if getattr(self, "is_there", False) else 1.0

    def keep(self, state: Tensor) -> None:
        super().keep(state)
        self.is_there = True


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


class Filled(Remembers):
    """Fills a table that is there from the begin, and notes how far."""

    def make(self) -> None:
        self.filled = 0
        self.register_buffer("state", torch.zeros(WIDTH))

    def scale(self) -> Tensor | float:
        return 1.0 + self.state if self.filled else 1.0

    def keep(self, state: Tensor) -> None:
        self.state[:] = state.cos()
        self.filled += 1


class Builds(Remembers):
    """Makes a parameter in its first forward, and a buffer, once."""

    def make(self) -> None:
        self.is_built = False

    def scale(self) -> Tensor | float:
        if not self.is_built:
            self.weight = nn.Parameter(torch.rand_like(self.linear.bias))
            self.register_buffer("state", torch.ones_like(self.linear.bias))
            self.is_built = True
        return self.weight + self.state

    def keep(self, state: Tensor) -> None:
        pass


KINDS = [Remembers, Registers, NotSaved, EveryOther, Deletes, Numbers, Flagged, Table, Filled]


class Model(nn.Module):
    """A few of them."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(kind(), nn.Sequential(nn.Linear(WIDTH, WIDTH), kind()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


Product = Callable[[Model, Backend], Callable[[Tensor], Tensor]]


def with_ways(way: str, model: Model, backend: Backend) -> nn.Module:
    apply(model, "layers", way, backend)
    return model


def called(model: Model, backend: Backend, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(model, x, backend=backend, **options)


def wrapped(model: Model, backend: Backend) -> nn.Module:
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(
            layer, offload_inputs=True, min_offload_size=1, backend=backend
        )
    return model


def cloned(model: Model, backend: Backend) -> Callable[[Tensor], Tensor]:
    run = checkpoint_function(
        offload_ops_keys=["ops.aten.clone.default"], min_offload_size=1, backend=backend
    )
    return lambda x: run(model, x)


def recomputed(model: Model, backend: Backend) -> nn.Module:
    recompute_layers(model, ["layers.0", "layers.1"])
    return model


def streamed(model: Model, backend: Backend) -> nn.Module:
    offload_layers(model, ["layers"], backend=backend)
    return recomputed(model, backend)


def in_slices(model: Model, backend: Backend) -> nn.Module:
    return OffloadModel(
        model.layers, backend.device, num_slices=2, checkpoint_activation=True, backend=backend
    )


INSIDE: dict[str, dict[str, Any]] = {
    "call": {},
    "call, offload": {"offload_inputs": True, "min_offload_size": 1},
    "call, whole": {"early_stop": False},
    "call, reentrant": {"use_reentrant": True},
}
PRODUCTS: dict[str, Product] = {
    **{name: partial(called, options=options) for name, options in INSIDE.items()},
    **{way: partial(with_ways, way) for way in WAYS},
    "clones offloaded": cloned,
    "wrapper": wrapped,
    "recomputed layers": recomputed,
    "recomputed layers on the host": streamed,
    "slices": in_slices,
}
ON_THE_HOST = {"recomputed layers on the host", "slices"}
"""Products whose parameters stay there."""


def steps(
    kind: Callable[[], nn.Module], product: str | None, backend: Backend, order: tuple[int, ...]
) -> tuple[list[Tensor], list[str]]:
    """Two steps of microbatches in flight, which go back in some order: all numbers, and the names
    of the buffers.
    """
    torch.manual_seed(5)
    model = Model(kind)
    if product not in ON_THE_HOST:
        model.to(backend.device)
    call = model if product is None else PRODUCTS[product](model, backend)
    found = []
    for _ in range(2):
        inputs = [
            torch.randn(6 + number, WIDTH).to(backend.device).requires_grad_() for number in order
        ]
        losses = [call(x).square().sum() for x in inputs]
        for number in order:
            losses[number].backward()
        found += [*losses, *(x.grad for x in inputs)]
    found += [*(p.grad for p in model.parameters()), *model.buffers()]
    names = [name.replace("_checkpoint_wrapped_module.", "") for name, _ in model.named_buffers()]
    return [one.detach().cpu() for one in found if one is not None], names


@pytest.mark.covering(2)
@pytest.mark.parametrize("order", [(0,), (1, 2, 0)], ids=str)
@pytest.mark.parametrize("where", ["cpu", "late", "random", *ACCELERATORS])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("kind", KINDS)
def test_buffers_that_were_not_there_change_once(
    kind: type[nn.Module], product: str, where: str, order: tuple[int, ...]
) -> None:
    backend = make_backend(where)
    with backend.activate():
        found, names = steps(kind, product, backend, order)
        expected, expected_names = steps(kind, None, backend, order)
    assert same_bits(found, expected)
    assert names == expected_names


class Centred(nn.modules.lazy.LazyModuleMixin, nn.Module):
    """Has a parameter without a shape, and two buffers, which a forward reads and changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.UninitializedParameter()
        self.register_buffer("mean", nn.UninitializedBuffer())
        self.register_buffer("last", None)
        self.width = 0

    def initialize_parameters(self, x: Tensor) -> None:
        if self.has_uninitialized_params():
            self.width = x.shape[-1]
            self.scale.materialize(self.width)
            self.mean.materialize(self.width)
            with torch.no_grad():
                self.scale.fill_(2)
                self.mean.fill_(0.5)
            self.last = self.mean + 1

    def forward(self, x: Tensor) -> Tensor:
        y = (x.clone() * self.scale - self.mean * self.last[: self.width]).sin()
        self.mean += y.mean(0).detach()
        self.last = self.mean.cos()
        return y


class Own(Remembers):
    """Gives its buffer a shape itself, without a lazy module's hook."""

    def make(self) -> None:
        self.register_buffer("state", nn.UninitializedBuffer())

    def scale(self) -> Tensor | float:
        return 1.0 if nn.parameter.is_lazy(self.state) else 1.0 + self.state

    def keep(self, state: Tensor) -> None:
        if nn.parameter.is_lazy(self.state):
            self.state.materialize(state.shape)
        self.state.copy_(state)


def norm() -> nn.Module:
    return nn.LazyBatchNorm1d(momentum=None)


def images(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 4)), norm, nn.Flatten())


def norm_of_each() -> nn.Module:
    return images(nn.LazyInstanceNorm1d(affine=True, track_running_stats=True))


def twice() -> nn.Module:
    """Is initialized in the first of two calls."""
    lazy = Centred()
    return nn.Sequential(lazy, nn.Tanh(), lazy)


def scripted() -> nn.Module:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    return torch.jit.script(layers)


LAZY = [Centred, Own, Builds, norm, norm_of_each, twice]
WHOLE = ["call, whole", "call, reentrant", "reentrant", "reentrant, offload"]
"""A second run that stops early is not for scripted modules: PyTorch fails there, too."""


@pytest.mark.covering(2)
@pytest.mark.parametrize("where", ["cpu", "late", "random", *ACCELERATORS])
@pytest.mark.parametrize(
    ("kind", "product"),
    [
        *((kind, product) for kind in LAZY for product in PRODUCTS if product not in ON_THE_HOST),
        *((scripted, product) for product in WHOLE),
    ],
)
def test_lazy_and_scripted_modules_change_their_buffers_once(
    kind: Callable[[], nn.Module], product: str, where: str
) -> None:
    backend = make_backend(where)
    if kind is not scripted:
        skip_on_emulated(backend, "a move to a plug-in device gives a lazy parameter another type")
    order = (1, 2, 0)
    with backend.activate():
        found, names = steps(kind, product, backend, order)
        expected, expected_names = steps(kind, None, backend, order)
    assert same_bits(found, expected)
    assert names == expected_names


def test_no_hook_is_left_in_a_lazy_module() -> None:
    """Neither in one that ran, nor in one that did not."""
    layers = nn.ModuleList([nn.LazyBatchNorm1d(), nn.LazyBatchNorm1d()])

    def run(x: Tensor) -> Tensor:
        return layers[0](x)

    hooks = [len(one._forward_pre_hooks) for one in layers]
    checkpoint(run, torch.randn(6, WIDTH, requires_grad=True)).sum().backward()
    assert [len(one._forward_pre_hooks) for one in layers] == [hooks[0] - 1, hooks[1]]
