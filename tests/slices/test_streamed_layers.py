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
from helpers.sliced import (
    WIDTH,
    Offload,
    Offloaded,
    Stack,
    as_layers,
    both_ways,
    input_for,
    plain_and_offloaded,
    same_training,
    state,
)
from helpers.toy import moved, same_bits
from torch import nn
from torch.nn.utils import parametrizations, prune

from pp_offload import OffloadError, offload_layers
from pp_offload._slices.offloaded_layers import offloaded_in
from pp_offload.backends import Backend
from pp_offload.testing import SimulatedBackend

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*weight_norm. is deprecated:FutureWarning", "ignore:.*torch.jit"
)

DEPTH = 6
LAYER_BYTES = WIDTH * WIDTH * 4
"""Bytes of a layer."""


def stack(depth: int = DEPTH, order: list[int] | None = None) -> Stack:
    torch.manual_seed(1)
    return Stack((nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)), order)


def in_stack(model: nn.Module, backend: Backend, **options: Any) -> Offloaded:
    return model, offload_layers(model, "layers", backend=backend, **options)


ORDERS = {
    "in order": None,
    "backwards": [5, 4, 3, 2, 1, 0],
    "skipped": [0, 3, 5],
    "twice": [0, 1, 2, 0, 1, 3, 3, 4],
}


@pytest.mark.parametrize("num_resident", [1, 2, 99])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_layers_in_any_order(active: Backend, order: list[int] | None, num_resident: int) -> None:
    plain, model, handle = plain_and_offloaded(
        stack(order=order), in_stack, active, num_resident=num_resident
    )
    assert same_training(plain, model, active)
    assert handle.parameter_bytes_on_device == 0
    assert handle.peak_parameter_bytes_on_device <= num_resident * LAYER_BYTES
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
        assert handle.statistics().bytes_reloaded - before == moves * LAYER_BYTES
        is_last = [calls[i:] == [calls[i]] * (len(calls) - i) for i in range(len(calls))]
        repeats = [i + 1 < len(calls) and calls[i] == calls[i + 1] for i in range(len(calls))]
        expected = [1 if last or same else 2 for last, same in zip(is_last, repeats, strict=True)]
        assert seen == [num * LAYER_BYTES for num in expected]
        model.order = [0]  # a layer that was foreseen is given up: the program may write now
        with torch.enable_grad():
            y = model(input_for(backend))
        assert handle.parameter_bytes_on_device == LAYER_BYTES and y.requires_grad


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
            assert (
                backend.take_device_peak()
                == num_resident * LAYER_BYTES + head + inside * activation
            )
            # The last layer stays for backward; x, what the layers have given, and y.
            assert backend.device_bytes == LAYER_BYTES + head + (1 + DEPTH + 1) * activation
            gradient = torch.ones_like(y)
            y.backward(gradient)
            # In the last layer: x, what the layers before have given, y; the gradients of y, of the
            # layer's product and of its input; that of its weight.
            inside = 1 + (DEPTH - 1) + 1 + 3
            peak = (num_resident + 1) * LAYER_BYTES + head + inside * activation
            assert backend.take_device_peak() == peak
            assert backend.device_bytes == head + 4 * activation, "x, y, and their gradients"
            del x, y, gradient
            assert backend.device_bytes == head
            model.zero_grad()
        assert handle.peak_parameter_bytes_on_device == num_resident * LAYER_BYTES
        assert handle.parameter_bytes_on_device == 0
    backend.check()


def test_a_weight_that_something_else_has_stays_on_the_device(active: Backend) -> None:
    """Outside of its layer nobody would bring it."""
    model = stack()
    model.head.weight = model.layers[0].weight
    plain, model, handle = plain_and_offloaded(model, in_stack, active)
    assert model.head.weight is model.layers[0].weight
    assert model.head.weight.device == active.device
    assert same_training(plain, model, active)
    assert handle.peak_parameter_bytes_on_device == 2 * LAYER_BYTES


@on_two_backends
def test_a_model_that_is_moved_keeps_its_layers_on_the_host(active: Backend) -> None:
    """A trainer moves it to the device when it prepares it."""
    plain, model, handle = plain_and_offloaded(stack(), in_stack, active)
    before = [layer.weight.data_ptr() for layer in model.layers]
    model.to(active.device)
    assert [layer.weight.data_ptr() for layer in model.layers] == before
    assert same_training(plain, model, active)
    with pytest.raises(OffloadError, match="turned into torch.float64"):
        model.double()
    with pytest.raises(OffloadError, match="turned into another memory format"):
        model._apply(lambda weight: weight.mT.contiguous().mT)
    handle.close()
    moved(model, active.device)
    moved(plain, active.device)
    assert {p.device for p in model.parameters()} == {active.device}
    assert same_training(plain, model, active), "it is a plain model again"
    model.double()


@on_two_backends
def test_two_lists_in_two_calls(active: Backend) -> None:
    """What the first call moved to the host stays there."""

    def each(model: nn.Module, backend: Backend) -> Offloaded:
        handles = [
            offload_layers(model, name, backend=backend) for name in ("0.layers", "1.layers")
        ]
        return model, handles[0]

    plain, model, _ = plain_and_offloaded(nn.Sequential(stack(2), stack(3)), each, active)
    for part in model:
        assert {weight.device.type for weight in part.layers.parameters()} == {"cpu"}
    assert same_training(plain, model, active)


@on_two_backends
@pytest.mark.parametrize("is_copy", [False, True])
def test_a_second_call_replaces_the_first(active: Backend, is_copy: bool) -> None:
    """As in a notebook whose cell runs again."""
    plain, model, first = plain_and_offloaded(stack(), in_stack, active)
    if is_copy:
        model = copy.deepcopy(model)
    second = offload_layers(model, "layers", num_resident=1, backend=active)
    assert is_copy or "0 layers" in repr(first)
    assert same_training(plain, model, active)
    assert second.peak_parameter_bytes_on_device == LAYER_BYTES
    first.close()
    assert offloaded_in(model)
    second.close()
    assert all("forward" not in vars(module) for module in model.modules())


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


COMPILES: dict[str, Callable[[Stack], object]] = {
    "model": lambda model: model.compile(backend="eager"),
    "layers": lambda model: [layer.compile(backend="eager") for layer in model.layers],
}


@pytest.mark.quick("cpu")
@pytest.mark.parametrize("kind", ["cpu", "late"])
@pytest.mark.parametrize("what", COMPILES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_before_or_after(kind: str, what: str, when: str) -> None:
    torch.compiler.reset()
    backend, model = make_backend(kind), stack(depth=3)
    plain = copy.deepcopy(model)
    if when == "before":
        COMPILES[what](model)
    with offload_layers(model, "layers", backend=backend) as offloaded, backend.activate():
        if when == "after":
            COMPILES[what](model)
        for rows in (2, 3, 5):
            outputs = [module(torch.ones(rows, WIDTH)) for module in (model, plain)]
            sum(output.sum() for output in outputs).backward()
            assert same_bits(outputs[:1], outputs[1:]) and same_bits(state(model), state(plain))
        assert offloaded.statistics().bytes_reloaded > 0


def test_a_forward_inside_behind_an_interrupt_outside_of_layers() -> None:
    """It looks as if the other had not ended, and weights were written in a way that leaves no
    trace.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    backend = SimulatedBackend("late")
    with backend.activate(), torch.no_grad():
        x = input_for(backend)
        plain, model = (nn.Sequential(stack()) for _ in range(2))
        offload_layers(model, "0.layers", backend=backend)
        hook = model[0].layers[0].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(x)
        hook.remove()
        backend.synchronize()  # else the write and a copy that is under way are a race
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.data.mul_(2)
        assert same_bits([model[0](x)], [plain[0](x)])
    backend.check()


# Modules that are refused, and parameters that get other names while they wait

Change = Callable[[nn.Module], nn.Module]


def pruned(layer: nn.Module) -> nn.Module:
    prune.l1_unstructured(layer, "weight", 0.3)
    return layer


def pruned_for_good(layer: nn.Module) -> nn.Module:
    permanent: nn.Module = prune.remove(pruned(layer), "weight")
    return permanent


REFUSED: dict[str, tuple[Change, str]] = {
    "spectral": (nn.utils.spectral_norm, "spectral_norm, .*parametrizations"),
    "weight": (nn.utils.weight_norm, "weight_norm, .*parametrizations"),
    "pruned": (pruned, r"prune, .*prune\.remove\(\)"),
    "scripted": (torch.jit.script, "is of TorchScript"),
    "rnn": (lambda layer: nn.GRU(WIDTH, WIDTH), "is an RNN of PyTorch.* GRUCell"),
}
"""What makes a module that is refused, and what the message says."""

INSTEAD = [parametrizations.spectral_norm, parametrizations.weight_norm, pruned_for_good]


def stack_of(change: Change) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(change(nn.Linear(WIDTH, WIDTH))) for _ in range(3)))


@on_two_backends
@both_ways
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_advice(active: Backend, offload: Offload, name: str) -> None:
    """And the model is as before."""
    change, message = REFUSED[name]
    model = stack_of(change)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=rf"0' .*{message}"):
        offload(model, active)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert all("_apply" not in vars(module) for module in model.modules())


@on_two_backends
@both_ways
@pytest.mark.parametrize("change", INSTEAD)
def test_what_the_advice_says_works(active: Backend, offload: Offload, change: Change) -> None:
    model, _ = offload(stack_of(change), active)
    assert same_training(stack_of(change).to(active.device), model, active)


@on_two_backends
def test_modules_whose_parameters_stay_are_taken(active: Backend) -> None:
    def build() -> nn.Sequential:
        model = stack_of(nn.utils.spectral_norm)
        for layer in model:
            layer.append(nn.Linear(WIDTH, WIDTH).requires_grad_(False))
            layer.append(torch.jit.script(nn.Tanh()))
        return model

    model, _ = as_layers(build(), active, frozen_only=True)
    assert same_training(build().to(active.device), model, active)
