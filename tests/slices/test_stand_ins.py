"""What layers find in place of their parameters: layers on the host, and in slices."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from operator import is_
from typing import Any

import pytest
import torch
from conftest import make_backend, on_two_backends, skip_on_emulated
from sliced import state
from torch import Tensor, nn
from toy import moved, same_bits

from pp_offload import OffloadError, OffloadModel, offload_layers
from pp_offload.backends import Backend

WIDTH = 16


class First(nn.Module):
    """The first result of a layer that has several."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.layer(x)[0]
        return first


class Weight(nn.Module):
    """A layer that has one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)


class Asks(Weight):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.weight.requires_grad else x


class Descends(Weight):
    """Takes a step down a slope in its forward, whatever the mode."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = (x @ self.weight - x).square().sum()
            (slope,) = torch.autograd.grad(loss, self.weight, create_graph=self.training)
        return x @ (self.weight - 0.1 * slope)


class Learns(Weight):
    """Runs a backward in its forward, whatever the mode."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            (x.clone() @ self.weight).square().sum().backward()
        return x @ self.weight.detach()


def rnn(kind: type[nn.RNNBase]) -> Callable[[], nn.Module]:
    return lambda: First(kind(WIDTH, WIDTH, batch_first=True))


RNNS = {kind.__name__: rnn(kind) for kind in (nn.GRU, nn.RNN, nn.LSTM)}


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(make() for _ in range(depth)))
        self.handle: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def stack(make: Callable[[], nn.Module]) -> Stack:
    """With the same weights every time."""
    torch.manual_seed(1)
    return Stack(make)


@pytest.fixture(params=["layers", "model"])
def offload(request: pytest.FixtureRequest) -> Callable[[Stack, Backend], nn.Module]:
    """Makes the layers wait on the host, in either way; what is called then."""

    def as_layers(model: Stack, backend: Backend) -> nn.Module:
        model.handle = offload_layers(model, "layers", backend=backend)
        return model

    def as_model(model: Stack, backend: Backend) -> nn.Module:
        return OffloadModel(model.layers, backend.device, num_slices=3, backend=backend)

    return as_layers if request.param == "layers" else as_model


Offload = Callable[[Stack, Backend], nn.Module]


def plain_and_offloaded(
    make: Callable[[], nn.Module], offload: Offload, backend: Backend
) -> tuple[nn.Module, nn.Module]:
    return moved(stack(make), backend.device), offload(stack(make), backend)


def inputs(backend: Backend) -> Tensor:
    x = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(2))
    return x.to(backend.device)


def skip_what_it_lacks(backend: Backend, name: str, mode: Any = None) -> None:
    if name in RNNS:
        skip_on_emulated(backend, "PyTorch has no RNN for such a device but kernels of its own")
    if mode is torch.inference_mode:
        skip_on_emulated(backend, "products of it fail in inference mode, in any model")


@on_two_backends
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", [*RNNS, "Asks", "Descends"])
def test_evaluation_takes_the_way_of_the_plain_model(
    backend: Backend, offload: Offload, name: str, mode: Any
) -> None:
    """It may depend on whether parameters require grad, which no mode changes."""
    skip_what_it_lacks(backend, name, mode)
    if name == "Descends" and mode is torch.inference_mode:
        pytest.skip("in it nothing can enable grad")
    make = RNNS.get(name) or {"Asks": Asks, "Descends": Descends}[name]
    with backend.activate():
        plain, offloaded = plain_and_offloaded(make, offload, backend)
        for one in (plain, offloaded):
            one.eval()
        with mode():
            outputs = [one(inputs(backend)) for one in (plain, offloaded)]
        assert same_bits([outputs[0].cpu()], [outputs[1].cpu()])
        assert not outputs[1].requires_grad


@on_two_backends
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_backward_in_an_evaluation_reaches_the_parameters(
    backend: Backend, offload: Offload, mode: Any
) -> None:
    """It would be lost in what stands in their places."""
    skip_what_it_lacks(backend, "Learns", mode)
    with backend.activate():
        plain, offloaded = plain_and_offloaded(Learns, offload, backend)
        with mode():
            for one in (plain, offloaded):
                one(inputs(backend))
        assert all(parameter.grad is not None for parameter in offloaded.parameters())
        assert same_bits(state(offloaded), state(plain))


@pytest.mark.parametrize("kind", ["cpu", "late"])
def test_a_transform_without_grad(offload: Offload, kind: str) -> None:
    backend = make_backend(kind)
    with backend.activate(), torch.no_grad():
        pair = plain_and_offloaded(Asks, offload, backend)
        assert same_bits(*([torch.vmap(one)(inputs(backend))] for one in pair))


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")
def test_a_trace_without_grad() -> None:
    backend = make_backend("cpu")
    x = inputs(backend)
    with backend.activate(), torch.no_grad():
        model = Stack(Asks)
        offload_layers(model, "layers", backend=backend)
        traced = torch.jit.trace(model, x, check_trace=False)
        assert same_bits([traced(x + 1)], [model(x + 1)])
        model = Stack(Learns)
        offload_layers(model, "layers", backend=backend)
        with pytest.raises(OffloadError, match=r"a trace .* came to a parameter of layers\.0"):
            torch.jit.trace(model, x, check_trace=False)


class Seen(First):
    """Notes the memory that its layer computes with, and may raise."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.storages: list[Any] = []
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        for tensor in self.layer.parameters():
            self.storages.append(weakref.ref(tensor.untyped_storage()))
        y = super().forward(x)
        if self.fails:
            raise ValueError("in a layer")
        return y


@on_two_backends
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
@pytest.mark.parametrize("way", ["evaluation", "step", "failure"])
def test_an_rnn_keeps_nothing_on_the_device(
    backend: Backend, offload: Offload, kind: type[nn.RNNBase], way: str
) -> None:
    """It has a list of its weights, and keeps that."""
    skip_what_it_lacks(backend, kind.__name__)
    with backend.activate():
        model = Stack(lambda: Seen(kind(WIDTH, WIDTH)))
        layers: list[Any] = list(model.layers)
        lists = [one.layer._flat_weights for one in layers]
        called = offload(model, backend)
        layers[1].fails = way == "failure"
        with nullcontext() if way == "step" else torch.no_grad():
            if way == "failure":
                with pytest.raises(ValueError, match="in a layer"):
                    called(inputs(backend))
            else:
                y = called(inputs(backend))
        if way == "step":
            y.sum().backward()
            del y
        backend.synchronize()
        gc.collect()
        assert (model.handle or called).parameter_bytes_on_device == 0
        storages = [one for layer in layers for one in layer.storages]
        assert storages and not any(one() is not None for one in storages)
        for one, before in zip(layers, lists, strict=True):
            weights = one.layer._flat_weights
            assert weights is before and all(map(is_, weights, one.layer.parameters()))


@on_two_backends
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
def test_an_rnn_is_not_asked_to_flatten_what_stands_in(
    backend: Backend,
    offload: Offload,
    kind: type[nn.RNNBase],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With cuDNN that gives the tensors other memory, in place."""
    skip_what_it_lacks(backend, kind.__name__)
    with backend.activate():
        plain, offloaded = plain_and_offloaded(rnn(kind), offload, backend)
        with monkeypatch.context() as patch:
            patch.setattr(kind, "flatten_parameters", pytest.fail)
            results = []
            for one in (plain, offloaded):
                y = one(inputs(backend))
                y.sum().backward()
                results.append([y.detach().cpu(), *state(one)])
        assert same_bits(*results)


class Scales(Weight):
    """Reads an attribute of its parameter, and writes others."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.scale = 1 + getattr(self.weight, "scale", 2.0)
        self.bias.calls = getattr(self.bias, "calls", 0) + 1
        return x @ self.weight * self.weight.scale + self.bias


@on_two_backends
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_parameter_has_its_attributes_in_a_forward(
    backend: Backend, offload: Offload, mode: Any
) -> None:
    with backend.activate():
        plain, offloaded = plain_and_offloaded(Scales, offload, backend)
        for one in (*plain.modules(), *offloaded.modules()):
            if isinstance(one, Scales):
                one.weight.scale = 3.0  # a move or a copy would have lost it
        with mode():
            for _ in range(2):
                outputs = [one(inputs(backend)).detach().cpu() for one in (plain, offloaded)]
        assert same_bits(outputs[:1], outputs[1:])
        for one in (plain, offloaded):
            found = [vars(parameter) for parameter in one.parameters()]
            assert found == [{"scale": 5.0}, {"calls": 2}] * 3


@on_two_backends
def test_a_parameter_has_its_attributes_when_a_slice_runs_again(backend: Backend) -> None:
    with backend.activate():
        model = OffloadModel(
            Stack(Scales).layers,
            backend.device,
            num_slices=3,
            checkpoint_activation=True,
            backend=backend,
        )
        model(inputs(backend)).sum().backward()
        assert [vars(parameter) for parameter in model.parameters()] == [
            {"scale": 4.0},
            {"calls": 2},
        ] * 3
