"""``checkpoint`` does to one call what the checkpoints of a model do to its layers."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.toy import make_model, same_bits
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from pp_offload import OffloadConfig, checkpoint, checkpoint_function, checkpoint_wrapper
from pp_offload.backends import CpuBackend

OFFLOAD = {"offload_inputs": True, "min_offload_size": 1}


def test_inputs_leave_and_nothing_else() -> None:
    """To the byte: each call's input, its mask and its scale, shared ones once per forward."""
    backend = CpuBackend()
    run = checkpoint_function(**OFFLOAD, backend=backend)
    assert run.stash is not None
    block, x = nn.Linear(8, 8), torch.randn(6, 8)
    y = checkpoint(block, x, **OFFLOAD, backend=backend)
    y = checkpoint(lambda a, b: torch.tanh(a["x"]) * b, {"x": y}, b=y, **OFFLOAD, backend=backend)
    assert run.stash.statistics().bytes_offloaded == 2 * x.nbytes, "x, and y once"
    y.sum().backward()
    assert run.counts.recomputed_calls == run.counts.forward_calls == 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_call_written_for_pytorch(use_reentrant: bool) -> None:
    def run(call: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(1)
        layer, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.randn(3, 8)
        x.requires_grad_()
        options = {"use_reentrant": use_reentrant, "preserve_rng_state": True}
        y = call(layer, x, **options)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]

    assert same_bits(run(checkpoint), run(torch_checkpoint))


def test_equal_options_share_one_engine() -> None:
    run = checkpoint_function(offload_inputs=True, config=OffloadConfig(prefetch_bytes=7))
    assert run is checkpoint_function(offload_inputs=True, config=OffloadConfig(prefetch_bytes=7))
    assert run is not checkpoint_function(offload_inputs=True)
    assert run is not checkpoint_function(
        offload_inputs=True, config=OffloadConfig(prefetch_bytes=7), backend=CpuBackend()
    )
    assert checkpoint_function().stash is None


def test_an_engine_goes_with_its_backend() -> None:
    backend = CpuBackend()
    gone = weakref.ref(backend)
    x = torch.ones(64, requires_grad=True)
    checkpoint(torch.sin, x, backend=backend, **OFFLOAD).sum().backward()
    run = checkpoint_function(backend=backend, **OFFLOAD)
    assert run is checkpoint_function(backend=backend, **OFFLOAD)
    del run, backend
    gc.collect()
    assert gone() is None


def wrapped() -> nn.Sequential:
    """A model whose layers are wrapped one by one, with offload."""
    return nn.Sequential(*(checkpoint_wrapper(layer, **OFFLOAD) for layer in make_model(groups=())))


def test_names_and_attributes_of_a_wrapper_are_those_of_the_module() -> None:
    plain, model = make_model(groups=()), wrapped()
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    layer = checkpoint_wrapper(nn.Linear(2, 2))
    assert isinstance(layer, CheckpointWrapper) and layer.out_features == 2
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("make_copy", [copy.deepcopy, pickled])
def test_a_copy_of_wrappers_trains_alike(make_copy: Callable[[nn.Module], Any]) -> None:
    model = wrapped()
    other, recompute = make_copy(model), model[0].recompute
    assert other[0].recompute is recompute
    assert other[0].up.weight is not model[0].up.weight
    results = []
    for each in (other, make_model(groups=())):
        x = torch.linspace(-1, 1, 40).view(5, 8).requires_grad_()
        each(x).square().sum().backward()
        results.append([x.grad, *(p.grad for p in each.parameters())])
    assert same_bits(*results)
    assert recompute.stash.statistics().bytes_offloaded > 0
