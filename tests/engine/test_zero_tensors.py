"""Forward-mode AD saves zeros that have no memory: they stay, and what is beside them leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import BACKENDS, BEFORE_2_13, make_backend
from torch import Tensor, nn
from torch.autograd import forward_ad
from toy import same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, OffloadConfig, use_backend
from pp_offload._activations.stash import ActivationStash
from pp_offload._checkpoint.recompute import Recompute
from pp_offload._core.tensors import FLAGGED_DTYPES
from pp_offload.backends import Backend

Region = Callable[..., Tensor]
"""Computes a function of tensors, the first argument, and saves through a product."""

Moved = Callable[[], int]
"""How many bytes have left."""


@contextmanager
def groups(backend: Backend, config: OffloadConfig) -> Iterator[tuple[Region, Moved]]:
    with use_backend(backend, config=config) as manager:
        off_interface.init_chunk_handler(None, None, 1)

        def region(compute: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
            with off_interface(True, x, "core") as x:
                y = compute(x, *others)
            return off_interface.group_commit(y, name="core")

        yield region, lambda: manager.statistics().bytes_offloaded


@contextmanager
def activations(backend: Backend, config: OffloadConfig) -> Iterator[tuple[Region, Moved]]:
    context = OffloadActivations(
        min_offload_size=1, max_fwd_stash_size=1, config=config, backend=backend
    )

    def region(compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        with context:
            return compute(*tensors)

    with backend.activate():
        yield region, lambda: context.statistics().bytes_offloaded


@contextmanager
def checkpoints(backend: Backend, config: OffloadConfig) -> Iterator[tuple[Region, Moved]]:
    stash = ActivationStash("inputs", config, min_offload_size=1, backend=backend)
    with backend.activate():
        yield Recompute(stash), lambda: stash.statistics().bytes_offloaded


PRODUCTS = [groups, activations, checkpoints]
OPTIONS = {
    "host": OffloadConfig(min_offloaded_tensor_size=1),
    "disk": OffloadConfig(min_offloaded_tensor_size=1, tiers=("disk",)),
    "verified": OffloadConfig(min_offloaded_tensor_size=1, verify=True),
}


def saved_by_an_operator(region: Region, x: Tensor, norm: nn.Module) -> Tensor:
    """Layer norm's weight has no tangent, and neither have its statistics: zeros are saved."""
    dual = forward_ad.make_dual(x, torch.ones_like(x))
    y, tangent = forward_ad.unpack_dual(region(lambda x: norm(x).sin(), dual))
    return (tangent * y).sum()


def given_to_a_region(region: Region, x: Tensor, norm: nn.Module) -> Tensor:
    """A tangent of zeros, which a checkpoint keeps beside an argument that has memory."""
    zeros = torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device)
    return region(lambda x, zeros: x.sin() * zeros + x.cos(), x * 2, zeros).sum()


PROGRAMS = [saved_by_an_operator, given_to_a_region]


def step(program: Callable[..., Tensor], region: Region, device: torch.device) -> list[Tensor]:
    """Loss and gradients of a step in which each product has a region."""
    torch.manual_seed(3)
    norm = nn.LayerNorm(8).to(device)
    x = torch.randn(4, 8).to(device).requires_grad_()
    with forward_ad.dual_level():
        loss = program(region, x, norm)
        loss.backward()
    assert x.grad is not None
    return [loss.detach(), x.grad, *(p.grad for p in norm.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_gradients_are_equal(product: Any, program: Any, options: str, kind: str) -> None:
    if BEFORE_2_13 and (product, program) == (checkpoints, saved_by_an_operator):
        pytest.skip("checkpoints of such a torch have no forward-mode AD")
    backend = make_backend(kind)
    expected = step(program, lambda compute, *tensors: compute(*tensors), backend.device)
    for _ in range(2):
        with product(backend, OPTIONS[options]) as (region, moved):
            assert same_bits(step(program, region, backend.device), expected)
            assert moved() > 0


@pytest.mark.parametrize("kind", BACKENDS)
def test_zeros_that_are_offloaded_by_hand_stay(kind: str) -> None:
    backend = make_backend(kind)
    with use_backend(backend, config=OPTIONS["host"]) as manager:
        manager.init_model_chunk_offload_handler(None, None, 1)
        chunk = manager.cur_forward_chunk()
        assert chunk is not None
        zeros = torch._efficientzerotensor((4, 8), device=backend.device)
        found = chunk.reload(chunk.offload(zeros))
        ones = torch.ones(4, 8, device=backend.device)
        assert same_bits([found + ones], [ones])
        has_memory = not zeros._is_zerotensor()  # as on a device that has no such zeros
        assert (manager.statistics().bytes_offloaded > 0) is has_memory


@pytest.mark.filterwarnings("ignore")  # of kinds that PyTorch does not fully support
def test_kinds_that_stay_are_known_by_their_dtype() -> None:
    """A tensor of any other dtype is not asked whether it is of such a kind."""
    for dtype in {one for one in vars(torch).values() if isinstance(one, torch.dtype)}:
        tensor = torch.empty(1, dtype=dtype, device="meta")
        assert (dtype in FLAGGED_DTYPES) == (tensor.is_quantized or tensor.conj().is_conj())
