"""Modules that are refused, and parameters that get other names while they wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import make_backend, on_two_backends
from sliced import trained
from torch import nn
from torch.nn.utils import parametrizations, prune
from toy import same_bits

from pp_offload import OffloadError, OffloadModel, offload_layers
from pp_offload.backends import Backend

WIDTH = 8

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*weight_norm. is deprecated:FutureWarning", "ignore:.*torch.jit"
)

Change = Callable[[nn.Module], nn.Module]


def pruned(layer: nn.Module) -> nn.Module:
    prune.l1_unstructured(layer, "weight", 0.3)
    return layer


def pruned_for_good(layer: nn.Module) -> nn.Module:
    permanent: nn.Module = prune.remove(pruned(layer), "weight")
    return permanent


REFUSED: dict[str, tuple[Change, str]] = {
    "spectral": (nn.utils.spectral_norm, "spectral_norm, .*parametrizations.spectral_norm"),
    "weight": (nn.utils.weight_norm, "weight_norm, .*parametrizations.weight_norm"),
    "pruned": (pruned, r"prune, .*prune\.remove\(\)"),
    "scripted": (torch.jit.script, "is of TorchScript"),
    "traced": (lambda layer: torch.jit.trace(layer, torch.ones(2, WIDTH)), "is of TorchScript"),
    "rnn": (lambda layer: nn.GRU(WIDTH, WIDTH), "is an RNN of PyTorch.* GRUCell"),
}
"""What makes a module that is refused, and what the message says."""

INSTEAD: dict[str, Change] = {
    "spectral": parametrizations.spectral_norm,
    "weight": parametrizations.weight_norm,
    "pruned": pruned_for_good,
}


def stack(change: Change) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Sequential(*(nn.Sequential(change(nn.Linear(WIDTH, WIDTH))) for _ in range(3)))
    )


@pytest.fixture(params=["layers", "model"])
def offload(request: pytest.FixtureRequest) -> Callable[[nn.Sequential, Backend], Any]:
    """Makes the layers wait on the host, in either way; what is called then."""

    def as_layers(model: nn.Sequential, backend: Backend) -> Any:
        offload_layers(model, "0", backend=backend)
        return model

    def as_model(model: nn.Sequential, backend: Backend) -> Any:
        return OffloadModel(model[0], backend.device, backend=backend)

    return as_layers if request.param == "layers" else as_model


@on_two_backends
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_advice(backend: Backend, offload: Any, name: str) -> None:
    """And the model is as before."""
    change, message = REFUSED[name]
    model = stack(change)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with backend.activate(), pytest.raises(ValueError, match=rf"0\.0' .*{message}"):
        offload(model, backend)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert all("_apply" not in vars(module) for module in model.modules())


@on_two_backends
@pytest.mark.parametrize("name", INSTEAD)
def test_what_the_advice_says_works(backend: Backend, offload: Any, name: str) -> None:
    with backend.activate():
        plain = stack(INSTEAD[name]).to(backend.device)
        called = offload(stack(INSTEAD[name]), backend)
        assert same_bits(trained(called, backend, WIDTH), trained(plain, backend, WIDTH))


@on_two_backends
def test_modules_whose_parameters_stay_are_taken(backend: Backend) -> None:
    def build() -> nn.Sequential:
        model = stack(nn.utils.spectral_norm)
        for layer in model[0]:
            layer.append(nn.Linear(WIDTH, WIDTH).requires_grad_(False))
            layer.append(torch.jit.script(nn.Tanh()))
        return model

    with backend.activate():
        plain, model = build().to(backend.device), build()
        offload_layers(model, "0", frozen_only=True, backend=backend)
        assert same_bits(trained(model, backend, WIDTH), trained(plain, backend, WIDTH))


@on_two_backends
@pytest.mark.parametrize("change", [pruned, parametrizations.weight_norm])
def test_a_parameter_that_gets_another_name_later(backend: Backend, change: Change) -> None:
    """Is an error until the handle is closed."""
    with backend.activate():
        plain, model = (stack(lambda layer: layer) for _ in range(2))
        handle = offload_layers(model, "0", backend=backend)
        x = torch.ones(2, WIDTH).to(backend.device)
        model(x)
        for one in (plain, model):
            change(one[0][1][0])
        message = r"Linear in 0\.1 had a parameter 'weight'.* now has \[.*'bias'.*close\(\)"
        for _ in range(2):
            with pytest.raises(OffloadError, match=message):
                model(x)
        assert handle.parameter_bytes_on_device == 0
        handle.close()
        model.to(backend.device)
        assert same_bits(
            trained(model, backend, WIDTH), trained(plain.to(backend.device), backend, WIDTH)
        )


def test_a_parameter_that_goes_is_not_missed() -> None:
    """As a bias that a program sets to None."""
    plain, model = (stack(lambda layer: layer) for _ in range(2))
    backend = make_backend("late")
    with backend.activate():
        offload_layers(model, "0", backend=backend)
        for one in (plain, model):
            one[0][1][0].bias = None
        assert same_bits(trained(model, backend, WIDTH), trained(plain, backend, WIDTH))
