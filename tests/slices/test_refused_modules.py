"""Modules that are refused, and parameters that get other names while they wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import on_two_backends
from helpers.sliced import WIDTH, Offload, as_layers, both_ways, input_for, same_training
from torch import nn
from torch.nn.utils import parametrizations, prune

from pp_offload import OffloadError
from pp_offload.backends import Backend

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
    "spectral": (nn.utils.spectral_norm, "spectral_norm, .*parametrizations"),
    "weight": (nn.utils.weight_norm, "weight_norm, .*parametrizations"),
    "pruned": (pruned, r"prune, .*prune\.remove\(\)"),
    "scripted": (torch.jit.script, "is of TorchScript"),
    "rnn": (lambda layer: nn.GRU(WIDTH, WIDTH), "is an RNN of PyTorch.* GRUCell"),
}
"""What makes a module that is refused, and what the message says."""

INSTEAD = [parametrizations.spectral_norm, parametrizations.weight_norm, pruned_for_good]


def stack(change: Change) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(change(nn.Linear(WIDTH, WIDTH))) for _ in range(3)))


@on_two_backends
@both_ways
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_advice(active: Backend, offload: Offload, name: str) -> None:
    """And the model is as before."""
    change, message = REFUSED[name]
    model = stack(change)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=rf"0' .*{message}"):
        offload(model, active)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert all("_apply" not in vars(module) for module in model.modules())


@on_two_backends
@both_ways
@pytest.mark.parametrize("change", INSTEAD)
def test_what_the_advice_says_works(active: Backend, offload: Offload, change: Change) -> None:
    model, _ = offload(stack(change), active)
    assert same_training(stack(change).to(active.device), model, active)


@on_two_backends
def test_modules_whose_parameters_stay_are_taken(active: Backend) -> None:
    def build() -> nn.Sequential:
        model = stack(nn.utils.spectral_norm)
        for layer in model:
            layer.append(nn.Linear(WIDTH, WIDTH).requires_grad_(False))
            layer.append(torch.jit.script(nn.Tanh()))
        return model

    model, _ = as_layers(build(), active, frozen_only=True)
    assert same_training(build().to(active.device), model, active)


@on_two_backends
@pytest.mark.parametrize("change", [pruned, parametrizations.weight_norm])
def test_a_parameter_that_gets_another_name_later(active: Backend, change: Change) -> None:
    """Is an error until the handle is closed; one that becomes None is not missed."""
    plain, layers = (stack(lambda layer: layer) for _ in range(2))
    model, handle = as_layers(layers, active)
    x = input_for(active)
    model(x)
    for each in (plain, layers):
        change(each[1][0])
        each[2][0].bias = None
    message = r"Linear in 0\.1 had a parameter 'weight'.* now has \[.*'bias'.*close\(\)"
    for _ in range(2):
        with pytest.raises(OffloadError, match=message):
            model(x)
    assert handle.parameter_bytes_on_device == 0
    handle.close()  # type: ignore[attr-defined]
    model.to(active.device)
    assert same_training(plain.to(active.device), model, active)
