"""Whatever a checkpoint is given to call: the modules in it change their buffers once, and get
their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from helpers.toy import same_bits
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from pp_offload import checkpoint
from pp_offload._checkpoint.modules_of import MOST_ENTRIES, modules_of

WIDTH = 8


class Layer(nn.Module):
    """Each forward changes buffers that the next one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return self.linear(self.norm(x)).sin() * factor


class Caller:
    """Called, and no module."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return self.layer(x)


def scaled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    @wraps(function)
    def inner(x: Tensor) -> Tensor:
        return 3 * function(x)

    return inner


GLOBAL = Layer()


def with_global(x: Tensor) -> Tensor:
    return GLOBAL(x)


def by_global(layer: Layer) -> Callable[[Tensor], Tensor]:
    globals()["GLOBAL"] = layer
    return with_global


def by_default(layer: Layer) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor, layer: Layer = layer) -> Tensor:
        return layer(x)

    return function


def by_closure_of(layers: Any, key: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: layers[key](x)


CALLS: dict[str, Callable[[Layer], Callable[[Tensor], Tensor]]] = {
    "method": lambda layer: layer.forward,
    "partial": lambda layer: partial(layer, factor=2.0),
    "partial that is given it": lambda layer: partial(Layer.forward, layer),
    "decorated lambda": lambda layer: scaled(lambda x: layer(x)),
    "list": lambda layer: by_closure_of([layer], 0),
    "dict": lambda layer: by_closure_of({"one": layer}, "one"),
    "default": by_default,
    "global": by_global,
    "object": Caller,
}


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("made", CALLS.values(), ids=CALLS)
def test_buffers_change_once(made: Callable[..., Any], needs_grad: bool) -> None:
    """Where no input needs a gradient, PyTorch's older checkpoint drops those of parameters."""
    results = []
    for is_on in (False, True):
        torch.manual_seed(5)
        layer = Layer()
        function = made(layer)
        inputs = [torch.randn(6, WIDTH).requires_grad_(needs_grad) for _ in range(2)]
        run = partial(checkpoint, function, use_reentrant=not needs_grad) if is_on else function
        losses = [run(x).square().sum() for x in inputs]
        for loss in losses[::-1]:
            loss.backward()
        leaves = (*inputs, *layer.parameters())
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        results.append([*gradients, *layer.buffers()])
    assert same_bits(*results)


def test_modules_among_arguments_and_parts_of_modules() -> None:
    model = nn.Sequential(Layer(), Layer())
    first = model[0]
    assert modules_of(lambda x: first.norm(model(x))) == [model]
    assert modules_of(first.norm, first, model[1]) == [model[1], first]
    assert modules_of(torch.add, [first], {"a": (model[1],)}) == [model[1], first]


def test_what_has_no_modules() -> None:
    if Layer is None:  # so that it is in the closure, and never there
        later = Layer()
    itself: list[Any] = []
    itself.append(itself)
    data = list(range(MOST_ENTRIES + 1)) + [GLOBAL]
    for function in (torch.sin, len, Layer, lambda: later, lambda: itself, lambda: data, "text"):
        assert modules_of(function) == []
