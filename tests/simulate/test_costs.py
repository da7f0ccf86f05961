"""What operators cost: closed forms of their sizes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
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
    assert busy_s(lambda y: y.add_(1), meta(1000)) == pytest.approx(2 * 2000 / 0.5e11), "in place"
    assert busy_s(lambda y: y.zero_(), meta(1000)) == pytest.approx(2000 / 0.5e11), "not read"
    assert busy_s(torch.neg, meta(1, 10).expand(100, 10)) == pytest.approx((20 + 2000) / 0.5e11)


def test_what_returns_nothing_takes_its_time() -> None:
    def step() -> None:
        torch._foreach_add_([meta(1000), meta(1000)], [meta(1000), meta(1000)])

    assert busy_s(step) == pytest.approx(6 * 2000 / 0.5e11)


def test_a_table_is_read_row_by_row() -> None:
    rows = torch.empty(8, device="meta", dtype=torch.int64)
    taken = busy_s(F.embedding, rows, meta(100_000, 64))
    assert taken == pytest.approx((8 * 8 + 2 * 8 * 64 * 2) / 0.5e11)


def test_without_grad_products_take_their_operations_too() -> None:
    x, weight = meta(1024, 2048), meta(4096, 2048)
    with torch.inference_mode():
        assert busy_s(F.linear, x, weight) == pytest.approx(2 * 1024 * 2048 * 4096 / 0.5e12)


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
    more = saved - (2 * rows * 64 * 2 + rows * 4)
    assert 0 <= more < 64, "in, out, a number for each row, and seeds"


def test_in_float32_it_saves_what_the_memory_efficient_kernel_saves() -> None:
    q = torch.empty(2, 8, 1024, 64, device="meta", requires_grad=True)
    rows = 2 * 8 * 1024
    saved = saved_bytes(lambda x: F.scaled_dot_product_attention(x, x, x), q)
    more = saved - (2 * rows * 64 * 4 + rows * 4)
    assert 0 <= more < 64, "in, out, a number for each row, and seeds"


@pytest.mark.parametrize("is_causal", [False, True])
def test_both_kernels_compute_as_much(is_causal: bool) -> None:
    flops = []
    for dtype in (torch.bfloat16, torch.float32):
        q = torch.empty(1, 2, 4096, 64, device="meta", dtype=dtype, requires_grad=True)
        backend = VirtualBackend(replace(EVEN, memory_bytes_per_s=inf))
        with backend.activate():
            y = F.scaled_dot_product_attention(q, q, q, is_causal=is_causal)
            y.backward(torch.empty_like(y))
        flops.append(backend.compute.busy_s)
    assert flops[0] == pytest.approx(flops[1]) and flops[0] > 0


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


def test_an_rms_norm_saves_its_input_as_it_is() -> None:
    x, norm = meta(1000, 64, needs_grad=True), nn.RMSNorm(64, device="meta", dtype=torch.bfloat16)
    saved = saved_bytes(norm, x)
    assert saved == x.nbytes + norm.weight.nbytes + 2 * 1000 * 4, "and statistics in float32"
    assert busy_s(norm, x) == pytest.approx((2 * x.nbytes + 2 * 64 + 2 * 1000 * 4) / 0.5e11)


def test_afterwards_the_kernels_are_those_of_before() -> None:
    x, dtypes = meta(4, 4, needs_grad=True), []
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda one: dtypes.append(one.dtype), str):
            F.dropout(x, 0.5)
        with VirtualBackend(EVEN).activate():
            pass
    assert dtypes and set(dtypes) == {torch.bfloat16}, "a mask of numbers, as PyTorch has it"


def test_one_virtual_device_is_active_at_a_time() -> None:
    with VirtualBackend(EVEN).activate():
        with pytest.raises(RuntimeError, match="is active already; expected one at a time"):
            VirtualBackend(EVEN).activate().__enter__()
    with pytest.raises(KeyError), VirtualBackend(EVEN).activate():
        raise KeyError
    assert busy_s(torch.add, meta(1), meta(1)) > 0, "the next one is"


@pytest.mark.parametrize(
    "qkv",
    [
        pytest.param([(8, 16, 64)] * 3, id="without heads"),
        pytest.param([(2, 8, 16, 64), (2, 2, 16, 64), (2, 2, 16, 64)], id="other heads"),
        pytest.param([(2, 8, 16, 64), (2, 8, 16, 64), (2, 8, 16, 32)], id="other values"),
        pytest.param([(2, 8, 16, 512)] * 3, id="wide heads"),
    ],
)
def test_what_flash_does_not_take_goes_another_way(qkv: list[tuple[int, ...]]) -> None:
    found = []

    class Note(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found.append(str(func))
            return func(*args, **kwargs or {})

    tensors = [meta(*size, needs_grad=True) for size in qkv]
    with VirtualBackend(EVEN).activate(), Note(), suppress(RuntimeError):  # as on a device
        F.scaled_dot_product_attention(*tensors)
    assert not any("flash" in one for one in found)


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


def test_a_count_is_an_integer_and_compute_goes_on() -> None:
    with pytest.raises(ValueError, match="num_devices_per_host is 2.5, .* above 0, an integer"):
        replace(EVEN, num_devices_per_host=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="are 0.5 and 0.5, expected numbers that add up to less"):
        replace(EVEN, d2h_slowdown=0.5, h2d_slowdown=0.5)


def test_attention_has_rates_of_its_own_and_each_operator_a_gap() -> None:
    own = {"attention_fraction": 0.25, "attention_backward_fraction": 0.125}

    def seconds(**changes: Any) -> list[float]:
        backend = VirtualBackend(replace(EVEN, memory_bytes_per_s=1e30, **changes))
        qkv = [meta(1, 4, 512, 64, needs_grad=True) for _ in range(3)]
        times = [0.0]
        with backend.activate():
            y = F.scaled_dot_product_attention(*qkv, is_causal=True)
            times.append(backend.compute.busy_s)
            torch.autograd.grad(y, qkv, torch.empty_like(y))
            times.append(backend.compute.busy_s)
            qkv[0] @ qkv[0].mT
            times.append(backend.compute.busy_s)
        return [after - before for before, after in pairwise(times)]

    plain, slower, apart = seconds(), seconds(**own), seconds(kernel_gap_s=1.0)
    assert slower == pytest.approx([2 * plain[0], 4 * plain[1], plain[2]])
    assert apart == pytest.approx([time_s + 1 for time_s in plain])


def test_pinning_takes_the_hosts_time_and_libraries_the_devices_memory() -> None:
    backend = VirtualBackend(replace(EVEN, pin_bytes_per_s=2.0**20, workspace_bytes=1000))
    backend.allocate_host(2**21)
    assert (backend.host.now_s, backend.memory.peak_bytes) == (2.0, 1000)
