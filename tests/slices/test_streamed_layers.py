"""Layers of a plain model wait on the host: what is on the device, who has them, what fails."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import make_backend, on_two_backends
from helpers.sessions import assert_no_hooks
from helpers.sliced import WIDTH, input_for, same_training, state
from helpers.toy import moved, same_bits
from torch import Tensor, nn

from pp_offload import (
    OffloadedLayers,
    OffloadError,
    offload_layers,
)
from pp_offload.backends import Backend
from pp_offload.testing import SimulatedBackend

DEPTH = 6
ONE = WIDTH * WIDTH * 4
"""Bytes of a layer."""


class Stack(nn.Module):
    """Calls its layers in any order, with a head that is no layer."""

    def __init__(self, depth: int = DEPTH, order: list[int] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.order = list(range(depth)) if order is None else order

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = torch.tanh(self.layers[number](x))
        return self.head(x)


def stack(**options: Any) -> Stack:
    torch.manual_seed(1)
    return Stack(**options)


def plain_and_streamed(
    backend: Backend, model: Stack, **options: Any
) -> tuple[nn.Module, Stack, OffloadedLayers]:
    plain = copy.deepcopy(model)
    handle = offload_layers(model, "layers", backend=backend, **options)
    return moved(plain, backend.device), model, handle


ORDERS = {
    "in order": None,
    "backwards": [5, 4, 3, 2, 1, 0],
    "skipped": [0, 3, 5],
    "twice": [0, 1, 2, 0, 1, 3, 3, 4],
}


@pytest.mark.parametrize("num_resident", [1, 2, 99])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_layers_in_any_order(active: Backend, order: list[int] | None, num_resident: int) -> None:
    plain, model, handle = plain_and_streamed(active, stack(order=order), num_resident=num_resident)
    assert same_training(plain, model, active)
    assert handle.parameter_bytes_on_device == 0
    assert handle.peak_parameter_bytes_on_device <= num_resident * ONE
    assert_no_hooks()


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_from_the_second_forward_on_each_call_is_foreseen(order: list[int] | None) -> None:
    """Every layer is on its way when the one before computes, and none comes for nothing."""
    backend = SimulatedBackend("late")
    with backend.activate(), torch.no_grad():
        model = stack(order=order)
        handle = offload_layers(model, "layers", backend=backend)
        model(input_for(backend))
        before = handle.statistics().bytes_reloaded
        seen: list[int] = []
        for layer in model.layers:
            layer.register_forward_hook(lambda *_: seen.append(handle.parameter_bytes_on_device))
        model(input_for(backend))
        calls = model.order
        moves = 1 + sum(call != other for call, other in zip(calls, calls[1:], strict=False))
        assert handle.statistics().bytes_reloaded - before == moves * ONE
        is_last = [calls[i:] == [calls[i]] * (len(calls) - i) for i in range(len(calls))]
        repeats = [i + 1 < len(calls) and calls[i] == calls[i + 1] for i in range(len(calls))]
        expected = [1 if last or same else 2 for last, same in zip(is_last, repeats, strict=True)]
        assert seen == [num * ONE for num in expected]
        model.order = [0]  # a layer that was foreseen is given up: the program may write now
        with torch.enable_grad():
            y = model(input_for(backend))
        assert handle.parameter_bytes_on_device == ONE and y.requires_grad


@pytest.mark.parametrize("num_resident", [1, 2, 3])
@pytest.mark.parametrize("order", ["late", "eager", "random"])
def test_device_memory_is_arithmetic(order: str, num_resident: int) -> None:
    """So many layers, a layer's gradient, and the head; activations as without."""
    backend = SimulatedBackend(order)
    rows = 4
    activation, head = rows * WIDTH * 4, (WIDTH + 1) * WIDTH * 4
    with backend.activate():
        model = stack()
        for parameter in model.head.parameters():
            parameter.requires_grad_(False)
        handle = offload_layers(model, "layers", backend=backend, num_resident=num_resident)
        gc.collect()
        assert backend.device_bytes == head, "the layers are on the host"
        for _ in range(3):
            x = torch.randn(rows, WIDTH, requires_grad=True)
            backend.take_device_peak()
            y = model(x)
            # In the first layer behind which nothing is left to come: x, what the layers before
            # have given, its product and what becomes of it.
            inside = 1 + (DEPTH - num_resident) + 2
            assert backend.take_device_peak() == num_resident * ONE + head + inside * activation
            # The last layer stays for backward; x, what the layers have given, and y.
            assert backend.device_bytes == ONE + head + (1 + DEPTH + 1) * activation
            gradient = torch.ones_like(y)
            y.backward(gradient)
            # In the last layer: x, what the layers before have given, y; the gradients of y, of the
            # layer's product and of its input; that of its weight.
            inside = 1 + (DEPTH - 1) + 1 + 3
            peak = (num_resident + 1) * ONE + head + inside * activation
            assert backend.take_device_peak() == peak
            assert backend.device_bytes == head + 4 * activation, "x, y, and their gradients"
            del x, y, gradient
            assert backend.device_bytes == head
            model.zero_grad()
        assert handle.peak_parameter_bytes_on_device == num_resident * ONE
        assert handle.parameter_bytes_on_device == 0
    backend.check()


def test_only_what_is_frozen_waits(active: Backend) -> None:
    model = stack()
    for number in (0, 2, 3):
        model.layers[number].weight.requires_grad_(False)
    plain, model, handle = plain_and_streamed(active, model, frozen_only=True)
    devices = [layer.weight.device for layer in model.layers]
    host = torch.device("cpu")
    assert devices == [host if i in (0, 2, 3) else active.device for i in range(DEPTH)]
    values = [model.layers[i].weight.data_ptr() for i in (0, 2, 3)]
    assert same_training(plain, model, active)
    assert values == [model.layers[i].weight.data_ptr() for i in (0, 2, 3)]
    assert handle.statistics().bytes_offloaded == 0
    assert handle.statistics().bytes_reloaded > 0


def test_a_weight_that_something_else_has_stays_on_the_device(active: Backend) -> None:
    """Outside of its layer nobody would bring it."""
    model = stack()
    model.head.weight = model.layers[0].weight
    plain, model, handle = plain_and_streamed(active, model)
    assert model.head.weight is model.layers[0].weight
    assert model.head.weight.device == active.device
    assert same_training(plain, model, active)
    assert handle.peak_parameter_bytes_on_device == 2 * ONE


@on_two_backends
def test_a_model_that_is_moved_keeps_its_layers_on_the_host(active: Backend) -> None:
    """A trainer moves it to the device when it prepares it."""
    plain, model, handle = plain_and_streamed(active, stack())
    before = [layer.weight.data_ptr() for layer in model.layers]
    model.to(active.device)
    assert [layer.weight.data_ptr() for layer in model.layers] == before
    assert same_training(plain, model, active)
    with pytest.raises(OffloadError, match="turned into torch.float64"):
        model.double()
    handle.close()
    moved(model, active.device)
    moved(plain, active.device)
    assert {p.device for p in model.parameters()} == {active.device}
    assert same_training(plain, model, active), "it is a plain model again"
    model.double()


def test_when_it_is_closed_the_model_is_as_it_was() -> None:
    model = stack()
    attributes = [dict(vars(module)) for module in model.modules()]
    with offload_layers(model, "layers") as handle:
        y = model(input_for(make_backend("cpu")))
        assert set(vars(model.layers[0])) - set(attributes[2]) == {"forward", "_apply"}
    y.sum().backward()
    assert all(layer.weight.grad is not None for layer in model.layers), "graphs live on"
    after = [dict(vars(module)) for module in model.modules()]
    assert [set(names) for names in after] == [set(names) for names in attributes]
    assert not model._forward_hooks and not model._forward_pre_hooks
    handle.close()


def views_of_one_outside() -> nn.Module:
    """The head, which lies between, shares as well; but the layers alone wait."""
    model = stack(depth=2)
    model.flat = nn.Parameter(torch.zeros(3, WIDTH, WIDTH))
    for i, linear in enumerate([model.head, *model.layers]):
        linear.weight = nn.Parameter(model.flat.data[i])
    return model


@pytest.mark.parametrize(
    ("build", "layers", "options", "message"),
    [
        (stack, "head", {}, r"no module 'head' that is a ModuleList.*it has \['layers'\]"),
        (stack, "layers", {"num_resident": 0}, "num_resident is 0, expected an integer of at le"),
        (stack, "layers", {"frozen_only": True}, "have no frozen parameters.*freeze the base"),
        (
            views_of_one_outside,
            "layers",
            {},
            r"\('flat', 'layers.0.weight'\), \('flat', 'layers.1.weight'\).* share memory",
        ),
    ],
)
def test_bad_arguments(build: Any, layers: Any, options: dict[str, Any], message: str) -> None:
    """And the model is as before."""
    model = build()
    with pytest.raises(ValueError, match=message):
        offload_layers(model, layers, **options)
    assert all("forward" not in vars(module) for module in model.modules())


def compile_layers(model: Stack) -> None:
    for layer in model.layers:
        layer.compile(backend="eager")


def compile_model(model: Stack) -> None:
    model.compile(backend="eager")


@pytest.mark.quick("cpu")
@pytest.mark.parametrize("kind", ["cpu", "late"])
@pytest.mark.parametrize("compiles", [compile_model, compile_layers])
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_before_or_after(kind: str, compiles: Callable[[Stack], None], when: str) -> None:
    torch.compiler.reset()
    backend, model = make_backend(kind), stack(depth=3)
    plain = copy.deepcopy(model)
    if when == "before":
        compiles(model)
    with offload_layers(model, "layers", backend=backend) as offloaded, backend.activate():
        if when == "after":
            compiles(model)
        for rows in (2, 3, 5):
            outputs = [module(torch.ones(rows, WIDTH)) for module in (model, plain)]
            for output in outputs:
                output.sum().backward()
            assert same_bits(outputs[:1], outputs[1:]) and same_bits(state(model), state(plain))
        assert offloaded.statistics().bytes_reloaded > 0


class Outer(nn.Module):
    """Is interrupted behind the layers, or between them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = stack(depth=depth)

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        raise KeyboardInterrupt


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("is_between", [False, True])
def test_an_interrupt_outside_of_layers_leaves_nothing_to_another_forward(
    is_between: bool, depth: int
) -> None:
    """The next one looks as if it were inside of that which never ended, and weights were written
    meanwhile in a way that leaves no trace.
    """
    backend = SimulatedBackend("late")
    x = torch.randn(2, WIDTH).to(backend.device)
    with backend.activate(), torch.no_grad():
        model = Outer(depth)
        plain = moved(copy.deepcopy(model), backend.device)
        offload_layers(model, "inner.layers", backend=backend, num_resident=min(2, depth))
        hook = model.inner.layers[0].register_forward_hook(interrupt) if is_between else None
        with pytest.raises(KeyboardInterrupt):
            model(x)
        if hook is not None:
            hook.remove()
        backend.synchronize()  # else the write and a copy that is under way are a race
        for step in (2, 3):
            for module in (model, plain):
                for parameter in module.parameters():
                    parameter.data.mul_(step)
            assert same_bits([model.inner(x)], [plain.inner(x)])
    backend.check()
