"""Whatever line of a forward an interrupt hits, parameters are where they were, and no hook stays.

While a layer computes, tensors on the device stand where its parameters are. Were one left there,
an optimizer would change parameters that no forward uses any more, and nothing would say so.
"""

from __future__ import annotations

from functools import partial
from operator import is_
from typing import Any

import pytest
import torch
from conftest import make_backend
from helpers.injected import Injected, chosen, files, interrupt_at, points_in
from helpers.sessions import assert_no_hooks
from helpers.sliced import (
    WIDTH,
    Inside,
    Offload,
    as_layers,
    as_slices,
    input_for,
    run_again,
    state,
)
from helpers.toy import same_bits
from torch import Tensor, nn

from pp_offload._hooks.regions import all_packs
from pp_offload.backends import Backend

PATHS = files("_slices/*", "offload_model")
CHECKPOINT = "_gradient_checkpointing_func"
OFFLOADS = {
    "slices": partial(as_slices, num_slices=2),
    "run again": partial(run_again, num_slices=2),
    "layers": as_layers,
}


def make(offload: Offload, backend: Backend) -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Sequential(Inside(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    layers[1].weight = layers[0].weight
    return offload(layers, backend)[0]


def step(model: nn.Module, backend: Backend, number: int) -> list[Tensor]:
    """The loss and the state after it, on the host."""
    loss = model(input_for(backend, number)).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.5 * parameter.grad
    results = [loss.detach().cpu(), *state(model)]
    model.zero_grad()
    return results


def exchanged(model: nn.Module) -> list[Any]:
    """Whatever may be exchanged: parameters, and functions that checkpoint."""
    values = [parameter for module in model.modules() for parameter in module._parameters.values()]
    return values + [vars(m)[CHECKPOINT] for m in model.modules() if CHECKPOINT in vars(m)]


@pytest.mark.parametrize("every", [pytest.param(8), pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", ["cpu", "late"])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_an_interrupt_at_every_line(kind: str, offload: str, every: int) -> None:
    backend = make_backend(kind)
    with backend.activate():
        model = make(OFFLOADS[offload], backend)
        expected = [step(model, backend, number) for number in range(3)]
        points = chosen(points_in(PATHS, lambda: model(input_for(backend, 1))), every=every)
    assert len(points) > 100 // every
    for point in points:
        backend = make_backend(kind)
        with backend.activate():
            model = make(OFFLOADS[offload], backend)
            before = exchanged(model)
            assert same_bits(step(model, backend, 0), expected[0])
            with interrupt_at(point.number, PATHS), pytest.raises(Injected):
                model(input_for(backend, 1))
            assert all(map(is_, exchanged(model), before)), f"something else stands there: {point}"
            assert not all_packs(), f"hooks stay: {point}"
            for number in (1, 2):
                assert same_bits(step(model, backend, number), expected[number]), point
    assert_no_hooks()
