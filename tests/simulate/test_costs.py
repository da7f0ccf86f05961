"""Closed forms: costs of operators by their sizes, or measured; when work and copies end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytest import approx
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pp_offload.simulate import DEVICES, Hardware, VirtualBackend
from pp_offload.simulate.clocks import HostClock, Link, VirtualStream
from pp_offload.simulate.costs import OperatorCosts, tensors_in
from pp_offload.simulate.device import ROUNDING_BYTES, DeviceMemory

aten = torch.ops.aten

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


def meta(*size: int, needs_grad: bool = False, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(size, device="meta", dtype=dtype, requires_grad=needs_grad)


def busy_s(work: Any, *tensors: Tensor, operator_seconds: Any = None) -> float:
    """Time in which the device works on it."""
    backend = VirtualBackend(EVEN, operator_seconds)
    with backend.activate():
        work(*tensors)
    return backend.compute.busy_s


@pytest.mark.parametrize(
    ("work", "tensors", "nbytes"),
    [
        (torch.mm, [meta(1, 64), meta(64, 64)], 2 * (2 * 64 + 64**2)),
        (torch.add, [meta(1000), meta(1000)], 3 * 2000),
        (lambda x: x + x, [meta(1000)], 2 * 2000),
        (lambda x: x.add_(1), [meta(1000)], 2 * 2000),
        (lambda x: x.zero_(), [meta(1000)], 2000),
        (torch.neg, [meta(1, 10).expand(100, 10)], 20 + 2000),
        (lambda x, y: torch._foreach_add_([x, y], [y, x]), [meta(1000), meta(1000)], 4 * 2000),
        (lambda x: F.embedding(x, meta(10**5, 64)), [meta(8, dtype=torch.int64)], 64 + 2 * 1024),
        (lambda x: x.view(-1, 8)[1:].detach().t(), [meta(64, 64)], 0),
        (torch.empty_like, [meta(64, 64)], 0),
        (torch.zeros_like, [meta(64, 64)], 64 * 64 * 2),
    ],
)
def test_an_operator_takes_its_bytes(work: Any, tensors: list[Tensor], nbytes: int) -> None:
    """Each tensor counts once, one that is changed twice, and of a table the rows that are read."""
    assert busy_s(work, *tensors) == approx(nbytes / 0.5e11)


def test_a_product_takes_its_operations() -> None:
    x, seconds = meta(1024, 2048), 2 * 1024 * 2048 * 4096 / 0.5e12
    assert busy_s(torch.mm, x, meta(2048, 4096)) == approx(seconds)
    with torch.inference_mode():
        assert busy_s(F.linear, x, meta(4096, 2048)) == approx(seconds)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_counts_what_is_not_masked(is_causal: bool) -> None:
    q, k = meta(2, 8, 1024, 64, needs_grad=True), meta(2, 2, 1024, 64)
    flops = 4 * 2 * 8 * 1024 * 1024 * 64 / (2 if is_causal else 1)

    def attend(*qkv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*qkv, is_causal=is_causal, enable_gqa=True)

    forward = busy_s(attend, q, k, k)
    assert forward == approx(flops / 0.5e12)
    backward = busy_s(lambda: torch.autograd.grad(attend(q, k, k), q, torch.empty_like(q)))
    assert backward - forward == approx(2.5 * flops / 0.5e12)


# Kernels of an accelerator


def saved_bytes(work: Any, *tensors: Tensor) -> int:
    """Bytes of the storages that autograd saves, each once."""
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        return saved.setdefault(tensor.untyped_storage()._cdata, tensor)

    with VirtualBackend(EVEN).activate(), saved_tensors_hooks(note, note):
        work(*tensors)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_saves_what_the_kernels_save(dtype: torch.dtype) -> None:
    """Its input, its output, a number for each row, and seeds: no scores."""
    q = torch.empty(2, 8, 1024, 64, device="meta", dtype=dtype, requires_grad=True)
    saved = saved_bytes(lambda x: F.scaled_dot_product_attention(x, x, x), q)
    assert 0 <= saved - (2 * q.nbytes + 2 * 8 * 1024 * 4) < 64


def test_dropout_saves_bytes_and_a_norm_its_input() -> None:
    x, norm = meta(1000, 64, needs_grad=True), nn.RMSNorm(64, device="meta", dtype=torch.bfloat16)
    for training, nbytes in ((True, 64_000), (False, 0)):
        assert saved_bytes(lambda y, t=training: F.dropout(y, 0.1, training=t), x) == nbytes
    statistics = 2 * 1000 * 4
    assert saved_bytes(norm, x) == x.nbytes + norm.weight.nbytes + statistics
    assert busy_s(norm, x) == approx((2 * x.nbytes + 2 * 64 + statistics) / 0.5e11)


@pytest.mark.parametrize(
    ("qkv", "kernel"),
    [
        ([(2, 8, 16, 64)] * 3, "FlashAttention"),
        ([(2, 8, 16, 64), (2, 8, 16, 64), (2, 8, 16, 32)], "EfficientAttention"),
        ([(2, 8, 16, 512)] * 3, "EfficientAttention"),
        ([(8, 16, 64)] * 3, "ToCopy"),  # without heads: by operators
    ],
)
def test_the_kernel_of_attention(qkv: list[tuple[int, ...]], kernel: str) -> None:
    with VirtualBackend(EVEN).activate():
        y = F.scaled_dot_product_attention(*(meta(*size, needs_grad=True) for size in qkv))
        assert kernel in y.grad_fn.name()
        with pytest.raises(RuntimeError, match="must match the size"):  # as on a device
            F.scaled_dot_product_attention(meta(2, 8, 16, 64), *[meta(2, 2, 16, 64)] * 2)


def test_one_virtual_device_is_active_and_leaves_no_kernels_behind() -> None:
    x, dtypes = meta(4, 4, needs_grad=True), []
    with VirtualBackend(EVEN).activate():
        with pytest.raises(RuntimeError, match="is active already; expected one at a time"):
            VirtualBackend(EVEN).activate().__enter__()
    with pytest.raises(KeyError), VirtualBackend(EVEN).activate():
        raise KeyError
    with saved_tensors_hooks(lambda x: dtypes.append(x.dtype), str):
        F.dropout(x, 0.5)
    assert dtypes == [torch.bfloat16], "a mask of numbers, as PyTorch has it"


# Measured times


def test_measured_times_replace_the_rates() -> None:
    tensors = meta(2, 64), meta(64, 64)

    def measured(func: Any, args: Any, kwargs: Any, outputs: Tensor) -> float | None:
        return outputs.shape[0] / 8 if func is aten.mm.default else None

    assert busy_s(torch.mm, *tensors, operator_seconds=measured) == approx(0.25)
    expected = busy_s(torch.mul, tensors[1], tensors[1])
    assert busy_s(torch.mul, tensors[1], tensors[1], operator_seconds=measured) == approx(expected)


# Repeated calls

X, Y, SMALL, WHOLE = meta(64, 32), meta(64, 32), meta(32), meta(64, 32, dtype=torch.int32)
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "a tensor": (aten.mul.Tensor, (X, Y)),
    "the same twice": (aten.mul.Tensor, (X, X)),
    "a number": (aten.mul.Tensor, (WHOLE, 2)),
    "a float": (aten.mul.Tensor, (WHOLE, 2.0)),
    "a bool": (aten.mul.Tensor, (WHOLE, True)),
    "transposed": (aten.mul.Tensor, (X.t(), Y.t())),
    "expanded": (aten.mul.Tensor, (SMALL.expand(64, 32), Y)),
    "broadcast": (aten.mul.Tensor, (SMALL, Y)),
    "another dtype": (aten.mul.Tensor, (X.float(), Y)),
    "several outputs": (aten.native_layer_norm.default, (X, [32], SMALL, None, 1e-5)),
    "a list": (aten.cat.default, ([X, Y, X],)),
    "another list": (aten.cat.default, ([X, Y], 1)),
    "some outputs": (
        aten.native_layer_norm_backward.default,
        (X, Y, [32], meta(64, 1).float(), meta(64, 1).float(), SMALL, None, [True, True, False]),
    ),
}


def layout(outputs: Any) -> list[Any]:
    tensors = (outputs,) if isinstance(outputs, Tensor) else outputs
    return [
        x if x is None else (x.shape, x.stride(), x.dtype, x.untyped_storage().nbytes())
        for x in tensors
    ]


def test_each_call_returns_what_it_returns_alone() -> None:
    """All calls by one object, each three times, in two orders; beside a new object."""
    together, outputs_of_all = OperatorCosts(EVEN), []
    for names in (CALLS, reversed(CALLS), CALLS):
        for name in names:
            outputs, seconds = together.run(*CALLS[name], {})
            expected, expected_s = OperatorCosts(EVEN).run(*CALLS[name], {})
            assert layout(outputs) == layout(expected), name
            assert seconds == expected_s > 0, name
            outputs_of_all += tensors_in(outputs)
    assert len(together._results) == len(CALLS), "no two of them are the same"
    storages = {tensor.untyped_storage()._cdata for tensor in outputs_of_all}
    assert len(storages) == len(outputs_of_all), "new memory each time"


def test_a_call_with_data_or_of_a_subclass_runs_each_time() -> None:
    calls, kind = OperatorCosts(EVEN), type("Kind", (Tensor,), {})
    for x in (torch.Tensor._make_subclass(kind, meta(4, dtype=torch.float32)), torch.ones(4)):
        calls.run(aten.mul.Tensor, (x, x), {})
    assert not calls._results


# Hardware


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"link_bytes_per_s": 0}, "link_bytes_per_s is 0, expected a number above 0"),
        ({"matmul_fraction": 1.2}, "matmul_fraction is 1.2, expected at most 1"),
        ({"d2h_slowdown": 0.5, "h2d_slowdown": 0.5}, "are 0.5 and 0.5, .* add up to less than 1"),
    ],
)
def test_rates_have_bounds(changes: dict[str, Any], message: str) -> None:
    assert replace(EVEN, launch_s=0, copy_latency_s=0).launch_s == 0
    with pytest.raises(ValueError, match=message):
        replace(EVEN, **changes)
    with pytest.raises(ValueError, match="operator_seconds of aten.mm.default is -1, expected a n"):
        busy_s(torch.mm, meta(4, 4), meta(4, 4), operator_seconds=lambda *_: -1)


def test_attention_has_rates_of_its_own_and_each_operator_a_gap() -> None:
    def seconds(**changes: Any) -> list[float]:
        backend = VirtualBackend(replace(EVEN, memory_bytes_per_s=1e30, **changes))
        qkv = [meta(1, 4, 512, 64, needs_grad=True) for _ in range(3)]
        with backend.activate():
            y = F.scaled_dot_product_attention(*qkv, is_causal=True)
            forward_s = backend.compute.busy_s
            torch.autograd.grad(y, qkv, torch.empty_like(y))
            both_s = backend.compute.busy_s
            qkv[0] @ qkv[0].mT
        return [forward_s, both_s - forward_s, backend.compute.busy_s - both_s]

    own = {"attention_fraction": 0.25, "attention_backward_fraction": 0.125}
    plain, slower, apart = seconds(), seconds(**own), seconds(kernel_gap_s=1.0)
    assert slower == approx([2 * plain[0], 4 * plain[1], plain[2]])
    assert apart == approx([time_s + 1 for time_s in plain])


def test_pinning_takes_the_hosts_time_and_libraries_the_devices_memory() -> None:
    backend = VirtualBackend(replace(EVEN, pin_bytes_per_s=2.0**20, workspace_bytes=1000))
    backend.allocate_host(2**21)
    assert (backend.host.now_s, backend.memory.peak_bytes) == (2.0, 1000)


# Streams, the link and memory: when work ends, and what copies cost compute

SLOW = replace(DEVICES["H100"], link_bytes_per_s=1.0, copy_latency_s=0, launch_s=0)
"""A byte a second each way, and a host that takes no time."""


class Copies:
    """Streams of copies on one link."""

    def __init__(self, **changes: Any) -> None:
        self.host = HostClock(replace(SLOW, **changes))
        self.link = Link(self.host)
        self.streams = {way: VirtualStream(self.host) for way in ("out", "back", "out elsewhere")}

    def launch(self, way: str, nbytes: int) -> float:
        """When a copy to the host, or back, ends."""
        to_host = way != "back"
        return self.streams[way].launch_until(
            lambda begin: self.link.copy(begin, nbytes, to_host=to_host)
        )


@pytest.mark.parametrize(
    ("changes", "ways", "ends"),
    [
        ({}, "out,back,out,back", [10, 10, 20, 20]),
        ({}, "out,out elsewhere,back", [10, 20, 10]),
        ({"h2d_bytes_per_s": 2.0}, "out,back", [10, 5]),
        ({"copy_latency_s": 0.5}, "out,out", [10.5, 21]),
        ({"both_links_bytes_per_s": 1.5}, "out,back,out", [10, 15, 22.5]),
        ({"both_links_bytes_per_s": 1.0}, "out,back,out", [10, 20, 30]),
        ({"link_bytes_per_s": inf}, "out,back", [0, 0]),
    ],
)
def test_copies_of_ten_bytes_end(changes: dict[str, Any], ways: str, ends: list[float]) -> None:
    copies = Copies(**changes)
    assert [copies.launch(way, 10) for way in ways.split(",")] == approx(ends)
    num_back = ways.count("back")
    moved = copies.link.bytes_to_host, copies.link.bytes_to_device
    assert moved == (10 * (len(ends) - num_back), 10 * num_back)


def test_compute_is_slower_while_copies_run() -> None:
    copies = Copies(d2h_slowdown=0.5, h2d_slowdown=0.25)
    copies.launch("out", 4)
    assert copies.link.compute(0.0, 10.0) == 12.0, "two of its ten seconds in the first four"
    assert copies.link.compute(1.0, 1.0) == 3.0
    assert copies.link.compute(4.0, 10.0) == 14.0
    copies.launch("back", 8)
    assert copies.link.compute(0.0, 10.0) == 14.0, "one second in four, three in the next four"
    later = Copies(d2h_slowdown=0.25)
    later.host.wait_until(5.0)
    later.launch("out", 4)
    assert [later.link.compute(0.0, seconds) for seconds in (5.0, 8.0)] == [5.0, 9.0]


# Copies of the program itself

H100 = DEVICES["H100"]
NUMEL = 2**24
BYTES = NUMEL * 2
COPY_S = H100.copy_latency_s + BYTES / H100.link_bytes_per_s


def on(device: str) -> Tensor:
    return torch.empty(NUMEL, device=device, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("copy", "to_host", "blocks"),
    [
        (lambda: on("meta").cpu(), True, True),
        (lambda: on("meta").to("cpu", non_blocking=True), True, False),
        (lambda: on("cpu").copy_(on("meta")), True, True),
        (lambda: on("cpu").copy_(on("meta"), non_blocking=True), True, False),
        (lambda: on("cpu").to("meta"), False, True),
        (lambda: on("meta").copy_(on("cpu")), False, True),
    ],
)
def test_a_copy_of_the_program_takes_the_link(
    copy: Callable[[], Tensor], to_host: bool, blocks: bool
) -> None:
    """It runs on the compute stream."""
    backend = VirtualBackend(H100)
    with backend.activate():
        output = copy()
    assert output.device.type == ("cpu" if to_host else "meta") and output.nbytes == BYTES
    assert backend.compute.busy_s == approx(COPY_S)
    host_s = backend.compute.free_at_s if blocks else H100.launch_s
    assert backend.host.now_s == approx(host_s)
    moved = backend.link.bytes_to_host, backend.link.bytes_to_device
    assert moved == ((BYTES, 0) if to_host else (0, BYTES))


def test_a_copy_to_the_same_side_takes_no_link_and_one_to_the_other_has_its_layout() -> None:
    backend = VirtualBackend(H100)
    with backend.activate():
        on("meta").copy_(on("meta"))
        on("meta").float()
        on("cpu").copy_(on("cpu"))
        assert backend.link.bytes_to_host == backend.link.bytes_to_device == 0
        y = torch.empty(4, 6, device="meta").t().to("cpu", torch.bfloat16)
    assert (y.shape, y.stride(), y.dtype) == ((6, 4), (1, 6), torch.bfloat16)


# Streams


def test_work_begins_when_it_is_launched_and_all_that_it_waits_for_has_ended() -> None:
    host = HostClock(replace(H100, launch_s=1.0, num_queued_launches=2))
    compute, d2h = VirtualStream(host), VirtualStream(host)
    assert [compute.launch(10.0) for _ in "ab"] == [11.0, 21.0], "behind the first"
    assert (host.now_s, compute.busy_s) == (2.0, 20.0)
    made = compute.record_event()
    d2h.wait_event(made)
    assert d2h.launch(4.0) == 25.0
    assert d2h.stalled_s == 18.0, "from 3, when it was launched, to 21"
    assert compute.launch(1.0) == 22.0, "beside the other stream"
    assert host.now_s == 11.0, "until the first of three had ended"
    assert not made.query()
    made.synchronize()
    assert made.query() and host.now_s == 21.0
    host.wait_until(30.0)
    assert compute.launch(1.0) == 32.0
    assert compute.stalled_s == 0.0, "a gap of the host is no stall"


# Memory


def test_storages_count_once_while_they_live_and_as_large_as_they_are() -> None:
    memory = DeviceMemory()
    first, other = (torch.empty(n, dtype=torch.uint8, device="meta") for n in (4096, 1))
    for each in (first, other, first):
        memory.see(each.untyped_storage())
    assert memory.live_bytes == memory.peak_bytes == 4096 + ROUNDING_BYTES
    del first, each
    assert memory.live_bytes == ROUNDING_BYTES
    assert memory.take_peak() == 4096 + ROUNDING_BYTES
    assert memory.peak_bytes == ROUNDING_BYTES, "from then on"
    for nbytes in (8192, 512):
        other.untyped_storage().resize_(nbytes)
        memory.see(other.untyped_storage())
        assert memory.live_bytes == nbytes
    assert memory.peak_bytes == 8192
