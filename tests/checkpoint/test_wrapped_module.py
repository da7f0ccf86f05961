"""``checkpoint_wrapper`` makes a module that is computed again, and changes no bit and no name."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from conftest import on_two_backends
from helpers.toy import make_model, same_bits
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from pp_offload import checkpoint_wrapper
from pp_offload.backends import Backend

OFFLOAD = {"offload_inputs": True, "min_offload_size": 1}


def wrapped(backend: Backend | None, **options: object) -> nn.Sequential:
    """A model whose layers are wrapped one by one."""
    model = make_model(groups=())
    if backend is not None:
        model = model.to(backend.device)
    for name, layer in list(model.named_children()):
        model.register_module(name, checkpoint_wrapper(layer, backend=backend, **options))  # type: ignore[arg-type]
    return model


def step(model: nn.Module, device: torch.device | str = "cpu") -> list[Tensor]:
    x = torch.linspace(-1, 1, 40).view(5, 8).to(device).requires_grad_()
    loss = model(x).square().sum()
    loss.backward()
    assert x.grad is not None
    tensors = [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]
    model.zero_grad()
    return tensors


@pytest.mark.parametrize("options", [{}, OFFLOAD, {**OFFLOAD, "use_reentrant": True}], ids=str)
@on_two_backends
def test_equal_bit_for_bit(backend, options) -> None:
    with backend.activate():
        expected = step(make_model(groups=()).to(backend.device), backend.device)
        model = wrapped(backend, **options)
        for _ in range(3):
            assert same_bits(step(model, backend.device), expected)
        recompute = model[0].recompute
        assert recompute.counts.recomputed_calls == 9
        if options:
            gc.collect()
            statistics = recompute.stash.statistics()
            assert statistics.bytes_offloaded == 3 * 3 * 160, "of each step, a layer's input"
            assert statistics.live_tensors == statistics.host_bytes_in_use == 0


def test_names_in_the_state_dict_are_those_of_the_module() -> None:
    plain, model = make_model(groups=()), wrapped(None)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    layer = checkpoint_wrapper(nn.Linear(2, 2))
    assert isinstance(layer, CheckpointWrapper) and layer.out_features == 2
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert list(layer.state_dict()) == ["weight", "bias"]


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("make_copy", [copy.deepcopy, pickled])
def test_a_copy_trains_alike(make_copy) -> None:
    model = wrapped(None, **OFFLOAD)
    other = make_copy(model)
    assert other[0].recompute is model[0].recompute
    assert other[0].up.weight is not model[0].up.weight
    before = model[0].recompute.stash.statistics().bytes_offloaded
    assert same_bits(step(other), step(make_model(groups=())))
    assert model[0].recompute.stash.statistics().bytes_offloaded > before
