"""Whatever a checkpoint is given to call: the modules in it change their buffers once, are in the
mode that they were in, and get their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from toy import same_bits

from pp_offload import checkpoint
from pp_offload._checkpoint.modules_of import MOST_ENTRIES, modules_of

WIDTH = 8


class Layer(nn.Module):
    """Each forward changes buffers that the next one reads, and where it trains alone."""

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


def by_closure_of(layers: Any, *keys: Any) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        for key in keys:
            x = layers[key](x)
        return x

    return function


CALLS: dict[str, Callable[[Layer], Callable[[Tensor], Tensor]]] = {
    "module": lambda layer: layer,
    "method": lambda layer: layer.forward,
    "partial": lambda layer: partial(layer, factor=2.0),
    "partial that is given it": lambda layer: partial(Layer.forward, layer),
    "lambda": lambda layer: lambda x: layer(x),
    "decorated": lambda layer: scaled(layer),
    "list": lambda layer: by_closure_of([nn.Tanh(), layer], 0, 1),
    "dict": lambda layer: by_closure_of({"one": layer}, "one"),
    "default": by_default,
    "global": by_global,
    "object": Caller,
}
WAYS: dict[str, dict[str, Any]] = {
    "offloaded": {"offload_inputs": True, "min_offload_size": 1},
    "reentrant": {"use_reentrant": True},
}


def step(
    made: Callable[[Layer], Callable[[Tensor], Tensor]],
    way: dict[str, Any] | None,
    *,
    needs_grad: bool = True,
) -> list[Tensor]:
    """Two microbatches in flight."""
    torch.manual_seed(5)
    layer = Layer()
    function = made(layer)
    losses, inputs = [], []
    for _ in range(2):
        x = torch.randn(6, WIDTH).requires_grad_(needs_grad)
        inputs.append(x)
        y = function(x) if way is None else checkpoint(function, x, **way)
        losses.append(y.square().sum())
    for loss in losses[::-1]:
        loss.backward()
    found = [*(x.grad for x in inputs), *(p.grad for p in layer.parameters()), *layer.buffers()]
    return [one.detach().clone() for one in found if one is not None]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("made", CALLS.values(), ids=CALLS)
def test_buffers_change_once(made: Callable[..., Any], way: dict[str, Any]) -> None:
    assert same_bits(step(made, way), step(made, None))


@pytest.mark.parametrize("made", CALLS.values(), ids=CALLS)
def test_parameters_have_gradients_where_no_input_has(made: Callable[..., Any]) -> None:
    """PyTorch's older checkpoint drops them."""
    gradients = step(made, {"use_reentrant": True}, needs_grad=False)
    assert same_bits(gradients, step(made, None, needs_grad=False))


def test_a_module_among_arguments() -> None:
    def run(layer: Layer, x: Tensor, *, last: nn.Module) -> Tensor:
        return last(layer(x))

    found = []
    for is_on in (False, True):
        torch.manual_seed(5)
        layer, last = Layer(), nn.BatchNorm1d(WIDTH)
        x = torch.randn(6, WIDTH)
        y = checkpoint(run, layer, x, last=last) if is_on else run(layer, x, last=last)
        y.square().sum().backward()
        parts = (layer, last)
        grads = [p.grad for part in parts for p in part.parameters() if p.grad is not None]
        found.append([*grads, *(buffer for part in parts for buffer in part.buffers())])
    assert same_bits(*found)


def test_only_whole_modules_are_found() -> None:
    model = nn.Sequential(Layer(), Layer())
    first = model[0]
    assert modules_of(lambda x: first.norm(model(x))) == [model]
    assert modules_of(first.norm, first, model[1]) == [model[1], first]


def test_what_has_no_modules() -> None:
    if Layer is None:  # so that it is in the closure, and never there
        later = Layer()
    itself: list[Any] = []
    itself.append(itself)
    data = list(range(MOST_ENTRIES + 1)) + [GLOBAL]
    for function in (torch.sin, len, Layer, lambda: later, lambda: itself, lambda: data, "text"):
        assert modules_of(function) == []
