"""Weights that hooks of a layer compute, and parameters that get other names while they wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import make_backend, on_two_backends, skip_on_emulated
from sliced import trained
from torch import nn
from torch.nn.utils import parametrizations, prune
from toy import same_bits

from pp_offload import OffloadError, OffloadModel, offload_layers
from pp_offload._slices.offloaded_layers import waits
from pp_offload.backends import Backend

WIDTH = 8

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*weight_norm. is deprecated:FutureWarning", "ignore:.*torch.jit"
)

Change = Callable[[nn.Module], nn.Module]


def pruned(layer: nn.Module, times: int = 1) -> nn.Module:
    for _ in range(times):
        prune.l1_unstructured(layer, "weight", 0.3)
    return layer


def pruned_for_good(layer: nn.Module) -> nn.Module:
    permanent: nn.Module = prune.remove(pruned(layer), "weight")
    return permanent


HOOKS: dict[str, tuple[Change, str]] = {
    "spectral": (nn.utils.spectral_norm, r"torch\.nn\.utils\.spectral_norm"),
    "weight": (nn.utils.weight_norm, r"torch\.nn\.utils\.weight_norm"),
    "pruned": (pruned, r"torch\.nn\.utils\.prune"),
    "pruned twice": (lambda layer: pruned(layer, 2), r"torch\.nn\.utils\.prune"),
}
"""What adds a hook to a layer, and how the message calls it."""

HOOKED: dict[str, Change] = {name: change for name, (change, _) in HOOKS.items()}

OTHERS: dict[str, Change] = {
    "parametrized spectral": parametrizations.spectral_norm,
    "parametrized weight": parametrizations.weight_norm,
    "pruned for good": pruned_for_good,
}
"""What the messages say to do instead."""


def stack(change: Change, is_deeper: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [change(nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    return nn.Sequential(
        nn.Sequential(*(nn.Sequential(x) for x in layers) if is_deeper else layers)
    )


def assert_as_before(model: nn.Module, before: list[int]) -> None:
    assert not waits(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


@on_two_backends
@pytest.mark.parametrize("name", HOOKED)
def test_a_hook_of_a_layer_itself_is_refused(backend: Backend, name: str) -> None:
    """It would compute from parameters on the host. The model is as before."""
    model = stack(HOOKED[name])
    before = [parameter.data_ptr() for parameter in model.parameters()]
    message = rf"'0\.0' has {HOOKS[name][1]} on its 'weight'.*nn\.Sequential\(layer\)"
    with backend.activate(), pytest.raises(ValueError, match=message):
        offload_layers(model, "0", backend=backend)
    assert_as_before(model, before)


def test_each_hook_is_named_with_what_to_do() -> None:
    model = stack(nn.utils.spectral_norm)
    prune.l1_unstructured(nn.utils.weight_norm(model[0][1], "bias", dim=None), "bias_v", 0.3)
    message = (
        r"'0\.0' has .*spectral_norm on its 'weight'; '0\.1' has .*'weight'; '0\.1' has "
        r".*weight_norm on its 'bias'; '0\.1' has .*prune on its 'bias_v'; .*"
        r"parametrizations\.spectral_norm, .*parametrizations\.weight_norm, .*prune\.remove\(\)"
    )
    with pytest.raises(ValueError, match=message):
        offload_layers(model, "0")


@on_two_backends
@pytest.mark.parametrize("is_deeper", [False, True], ids=["layer", "deeper"])
@pytest.mark.parametrize("way", ["layers", "model"])
@pytest.mark.parametrize("name", [*HOOKED, *OTHERS])
def test_what_can_be_done_instead(backend: Backend, name: str, way: str, is_deeper: bool) -> None:
    """A hook inside of a layer runs where parameters are on the device."""
    if way == "layers" and name in HOOKED and not is_deeper:
        pytest.skip("is refused")
    change = (HOOKED | OTHERS)[name]
    with backend.activate():
        plain = stack(change, is_deeper).to(backend.device)
        called: Any = stack(change, is_deeper)
        if way == "layers":
            offload_layers(called, "0", backend=backend)
        else:
            called = OffloadModel(called[0], backend.device, num_slices=3, backend=backend)
        assert same_bits(trained(called, backend, WIDTH), trained(plain, backend, WIDTH))


@on_two_backends
@pytest.mark.parametrize("name", HOOKED)
def test_hooks_of_what_stays_on_the_device_are_taken(backend: Backend, name: str) -> None:
    """They compute on the device, before the layer's forward."""

    def build() -> nn.Sequential:
        model = stack(HOOKED[name])
        for layer in model[0]:
            layer.bias.requires_grad_(False)
        return model

    if name == "weight":
        skip_on_emulated(backend, "it cannot exchange parameters that a graph has")
    with backend.activate():
        plain, model = build().to(backend.device), build()
        offload_layers(model, "0", frozen_only=True, backend=backend)
        assert same_bits(trained(model, backend, WIDTH), trained(plain, backend, WIDTH))


CHANGES: dict[str, Change] = {
    **HOOKED,
    "parametrized weight": parametrizations.weight_norm,
    "parametrized spectral": parametrizations.spectral_norm,
}


@on_two_backends
@pytest.mark.parametrize("is_deeper", [False, True], ids=["layer", "deeper"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_parameter_that_gets_another_name_later(
    backend: Backend, name: str, is_deeper: bool
) -> None:
    """Is an error, and so is pruning that is made permanent; made again, it is as in plain."""
    with backend.activate():
        plain, model = (stack(lambda layer: layer, is_deeper) for _ in range(2))
        handle = offload_layers(model, "0", backend=backend)
        x = torch.ones(2, WIDTH).to(backend.device)
        model(x)
        for one in (plain, model):
            torch.manual_seed(3)  # spectral norm draws
            CHANGES[name](one[0][1][0] if is_deeper else one[0][1])
        message = r"Linear in 0\.1 had a parameter 'weight'.* now has \[.*'bias'.*close\(\)"
        for _ in range(2):
            with pytest.raises(OffloadError, match=message):
                model(x)
        assert handle.parameter_bytes_on_device == 0
        handle.close()
        if is_deeper or name not in HOOKED:
            offload_layers(model, "0", backend=backend)
        else:
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
            one[0][1].bias = None
        assert same_bits(trained(model, backend, WIDTH), trained(plain, backend, WIDTH))


def scripted(layer: nn.Module) -> nn.Module:
    return torch.jit.script(layer)


def traced(layer: nn.Module) -> nn.Module:
    return torch.jit.trace(layer, torch.ones(2, WIDTH))


@on_two_backends
@pytest.mark.parametrize("is_deeper", [False, True], ids=["layer", "deeper"])
@pytest.mark.parametrize("change", [scripted, traced])
def test_layers_of_torchscript_are_refused(
    backend: Backend, change: Change, is_deeper: bool
) -> None:
    model = stack(change, is_deeper)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    name = r"'0\.0\.0'" if is_deeper else r"'0\.0'"
    with backend.activate(), pytest.raises(ValueError, match=rf"modules \[{name}, .*TorchScript"):
        offload_layers(model, "0", backend=backend)
    assert_as_before(model, before)


@on_two_backends
@pytest.mark.parametrize("place", ["a layer", "inside"])
def test_torchscript_without_parameters_that_wait_is_taken(backend: Backend, place: str) -> None:
    def build() -> nn.Sequential:
        model = stack(lambda layer: layer, is_deeper=True)
        (model[0] if place == "a layer" else model[0][1]).append(torch.jit.script(nn.Tanh()))
        return model

    with backend.activate():
        plain, model = build().to(backend.device), build()
        offload_layers(model, "0", backend=backend)
        assert same_bits(trained(model, backend, WIDTH), trained(plain, backend, WIDTH))
