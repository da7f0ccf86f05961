"""What operators cost: closed forms of their sizes."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pp_offload.simulate import DEVICES, Hardware, VirtualBackend

EVEN = Hardware(
    name="even",
    matmul_flops=1e12,
    memory_bytes_per_s=1e11,
    memory_bytes=10**9,
    link_bytes_per_s=1e9,
    matmul_fraction=0.5,
    memory_fraction=0.5,
)
"""Half a TFLOP/s and 50 GB/s are reached."""


def meta(*size: int, needs_grad: bool = False) -> Tensor:
    return torch.empty(size, device="meta", dtype=torch.bfloat16, requires_grad=needs_grad)


def busy_s(work: Any, *tensors: Tensor) -> float:
    """How long the device works on it."""
    backend = VirtualBackend(EVEN)
    with backend.activate():
        work(*tensors)
    return backend.compute.busy_s


def test_a_product_takes_its_operations() -> None:
    left, right = meta(1024, 2048), meta(2048, 4096)
    assert busy_s(torch.mm, left, right) == pytest.approx(2 * 1024 * 2048 * 4096 / 0.5e12)


def test_a_thin_product_takes_its_bytes() -> None:
    left, right = meta(1, 2048), meta(2048, 4096)
    nbytes = 2 * (2048 + 2048 * 4096 + 4096)
    assert busy_s(torch.mm, left, right) == pytest.approx(nbytes / 0.5e11)


def test_a_sum_takes_its_bytes_each_once() -> None:
    x = meta(1000)
    assert busy_s(torch.add, x, meta(1000)) == pytest.approx(3 * 2000 / 0.5e11)
    assert busy_s(torch.add, x, x) == pytest.approx(2 * 2000 / 0.5e11)
    assert busy_s(lambda y: y.add_(1), meta(1000)) == pytest.approx(2000 / 0.5e11), "in place"


def test_views_and_empty_memory_take_no_time() -> None:
    x = meta(64, 64)
    assert busy_s(lambda y: y.view(-1, 8)[1:].detach().t(), x) == 0.0
    assert busy_s(torch.empty_like, x) == 0.0
    assert busy_s(torch.zeros_like, x) == pytest.approx(64 * 64 * 2 / 0.5e11)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_counts_what_is_not_masked(is_causal: bool) -> None:
    q, k = meta(2, 8, 1024, 64, needs_grad=True), meta(2, 2, 1024, 64)
    flops = 4 * 2 * 8 * 1024 * 1024 * 64 / (2 if is_causal else 1)

    def attend(*qkv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*qkv, is_causal=is_causal, enable_gqa=True)

    forward = busy_s(attend, q, k, k)
    assert forward == pytest.approx(flops / 0.5e12)
    backward = busy_s(lambda: torch.autograd.grad(attend(q, k, k), q, torch.empty_like(q)))
    assert backward - forward == pytest.approx(2.5 * flops / 0.5e12)


def saved_bytes(work: Any, *tensors: Tensor) -> int:
    """Of the storages that autograd saves, each once."""
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage.nbytes()
        kept.append(storage)
        return tensor

    kept: list[Any] = []
    with VirtualBackend(EVEN).activate():
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            work(*tensors)
    return sum(found.values())


def test_attention_saves_what_the_flash_kernel_saves() -> None:
    q = meta(2, 8, 1024, 64, needs_grad=True)
    rows = 2 * 8 * 1024
    saved = saved_bytes(lambda x: F.scaled_dot_product_attention(x, x, x), q)
    assert saved - (2 * rows * 64 * 2 + rows * 4) < 64, "in, out, a number for each row, and seeds"


def test_so_it_does_where_a_checkpoint_recomputes_it() -> None:
    q = meta(1, 2, 4096, 64, needs_grad=True)
    scores = 2 * 4096 * 4096 * 2

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    backend = VirtualBackend(EVEN)
    with backend.activate():
        y = checkpoint(attend, q, use_reentrant=False)
        y.backward(torch.empty_like(y))
    assert backend.memory.peak_bytes < scores


@pytest.mark.parametrize("is_training", [False, True])
def test_a_dropout_saves_a_mask_of_bytes(is_training: bool) -> None:
    x = meta(1000, needs_grad=True)
    saved = saved_bytes(lambda y: F.dropout(y, 0.1, training=is_training), x)
    assert saved == (1000 if is_training else 0)


def test_afterwards_the_kernels_are_those_of_before() -> None:
    x = meta(4, 4, needs_grad=True)
    with VirtualBackend(EVEN).activate():
        pass
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one.dtype, lambda one: x):
        F.dropout(x, 0.5)  # as PyTorch does it there


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_each_device_of_the_table_is_one(name: str) -> None:
    assert DEVICES[name].name == name
    assert VirtualBackend(DEVICES[name]).name == f"virtual {name}"


@pytest.mark.parametrize("field", [one.name for one in fields(Hardware) if one.name != "name"])
@pytest.mark.parametrize("value", [-1.0, "many", True, float("nan")])
def test_a_number_that_makes_no_sense_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} is .*expected a number (above|at least) 0"):
        replace(EVEN, **{field: value})  # type: ignore[arg-type]


def test_a_rate_is_above_nothing_and_a_time_may_be_nothing() -> None:
    with pytest.raises(ValueError, match="link_bytes_per_s is 0, expected a number above 0"):
        replace(EVEN, link_bytes_per_s=0)
    assert replace(EVEN, launch_s=0, copy_latency_s=0).launch_s == 0


def test_a_fraction_is_at_most_one() -> None:
    with pytest.raises(ValueError, match="matmul_fraction is 1.2, expected at most 1"):
        replace(EVEN, matmul_fraction=1.2)
