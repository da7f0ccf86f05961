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

from pp_offload import (
    OffloadModel,
    checkpoint,
    offload_layers,
    recompute_layers,
)
from pp_offload._checkpoint.module_state import ModuleState
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


KINDS = [Remembers, Table, Shares]


class Model(nn.Module):
    """A few of them."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(kind(), nn.Sequential(nn.Linear(WIDTH, WIDTH), kind()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


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


PRODUCTS: dict[str, Callable[[Model, Backend], Callable[[Tensor], Tensor]]] = {
    "call": lambda model, backend: partial(checkpoint, model, backend=backend),
    "call, reentrant": lambda model, backend: partial(
        checkpoint, model, backend=backend, use_reentrant=True
    ),
    "by operator": by_operator,
    "recomputed layers on the host": streamed,
    "slices": in_slices,
}
ON_THE_HOST = {"recomputed layers on the host", "slices"}
"""Products whose parameters stay there. Buffers that share memory would be others there."""


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
    results = []
    for _ in range(2):
        inputs = [
            torch.randn(6 + number, WIDTH).to(backend.device).requires_grad_() for number in order
        ]
        losses = [call(x).square().sum() for x in inputs]
        for number in order:
            losses[number].backward()
        results += [*losses, *(x.grad for x in inputs)]
    results += [*(p.grad for p in model.parameters()), *model.buffers()]
    names = [name.replace("_checkpoint_wrapped_module.", "") for name, _ in model.named_buffers()]
    return [tensor.detach().cpu() for tensor in results if tensor is not None], names


@pytest.mark.covering(2)
@pytest.mark.parametrize("order", [(0,), (1, 2, 0)], ids=str)
@on_two_backends
@pytest.mark.parametrize(
    ("kind", "product"),
    [
        (kind, product)
        for kind in KINDS
        for product in PRODUCTS
        if kind is not Shares or product not in ON_THE_HOST
    ],
)
def test_buffers_that_were_not_there_change_once(
    kind: type[nn.Module], product: str, active: Backend, order: tuple[int, ...]
) -> None:
    results, names = steps(kind, product, active, order)
    expected, expected_names = steps(kind, None, active, order)
    assert same_bits(results, expected)
    assert names == expected_names


def with_and_without(
    make: Callable[[], nn.Module],
    call: Callable[[Any], Callable[[Tensor], Tensor]] = lambda layer: layer,
    then: Callable[[Any], object] = id,
    needs_grad: bool = True,
    **options: Any,
) -> bool:
    """Whether a layer called under a checkpoint has the bits that it has without; two microbatches
    are in flight, and ``then`` precedes their backwards.
    """
    results = []
    for is_on in (False, True):
        torch.manual_seed(5)
        layer = make()
        function = call(layer)
        inputs = [torch.randn(6, WIDTH).requires_grad_(needs_grad) for _ in range(2)]
        run = partial(checkpoint, function, **options) if is_on else function
        losses = [run(x).square().sum() for x in inputs]
        then(layer)
        for loss in losses[::-1]:
            loss.backward()
        leaves = (*inputs, *layer.parameters())
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        results.append([*gradients, *layer.buffers()])
    return same_bits(*results)


def norms() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(momentum=None))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_mode_and_lazy_parameters_are_those_of_the_forward(use_reentrant: bool) -> None:
    """The model is switched to evaluation before its backward; a lazy norm counts once."""
    assert with_and_without(norms, then=nn.Module.eval, use_reentrant=use_reentrant)
    assert with_and_without(lazy, use_reentrant=use_reentrant)


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


def test_copies_of_buffers_share_memory_as_these_do_and_take_no_more() -> None:
    module, table = nn.Module(), torch.zeros(2**20)
    for name, buffer in {"row": table[:4], "a": torch.zeros(4)}.items():
        module.register_buffer(name, buffer)
    module.register_buffer("same", module.a)
    module.register_buffer("view", module.a[1:3])
    state = ModuleState([module])
    for buffer in (module.row, module.a):
        buffer += 1
    with state.restored():
        assert module.row.untyped_storage().nbytes() == 16
        assert not module.row.any() and not module.a.any()
        module.a += 5
        assert torch.equal(module.same, module.a) and torch.equal(module.view, module.a[1:3])
    assert torch.equal(module.a, torch.ones(4)) and torch.equal(module.row, torch.ones(4))


class Layer(nn.Module):
    """Each forward changes buffers that the next one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return self.linear(self.norm(x)).sin() * factor


def scaled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return wraps(function)(lambda x: 3 * function(x))


GLOBAL = Layer()


def with_global(x: Tensor) -> Tensor:
    return GLOBAL(x)


def by_global(layer: Layer) -> Callable[[Tensor], Tensor]:
    globals()["GLOBAL"] = layer
    return with_global


CALLS: dict[str, Callable[[Layer], Callable[[Tensor], Tensor]]] = {
    "method": lambda layer: layer.forward,
    "partial that is given it": lambda layer: partial(Layer.forward, layer, factor=2.0),
    "decorated lambda over a dict": lambda layer: scaled(lambda x, a={"b": [layer]}: a["b"][0](x)),  # noqa: B006
    "closure": lambda layer: lambda x: layer(x),
    "default": lambda layer: lambda x, given=layer: given(x),
    "global": by_global,
}


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("made", CALLS.values(), ids=CALLS)
def test_buffers_change_once_whatever_is_called(made: Callable[..., Any], needs_grad: bool) -> None:
    """Where no input needs a gradient, PyTorch's older checkpoint drops those of parameters."""
    assert with_and_without(Layer, made, needs_grad=needs_grad, use_reentrant=not needs_grad)
