"""How fast a device is, in the terms of the virtual one: rates, and what launches and pinning cost.

hardware = DeviceSpeed(device, nbytes=2**28).hardware()
hardware.link_bytes_per_s
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pp_offload.backends import default_backend
from pp_offload.simulate import Hardware

SUSTAINED_S = 1.0
"""How long products run before they are timed: clocks fall when a device gets hot."""

NUM_ROUNDS, NUM_COPIES, NUM_LAUNCHES = 5, 8, 200

Pair = tuple[Tensor, Tensor]
"""A target and a source."""


class DeviceSpeed:
    """Measures a device. On the CPU nothing runs beside anything else.

    Args:
        device: Which one.
        nbytes: Of a copy, at least 4 KiB. Matrices are at most a quarter as large.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes
        self._is_host = device.type == "cpu"
        width = 2 ** (((nbytes // 8).bit_length() - 1) // 2)
        self._matrices = [self._random(width, width) for _ in range(2)]
        self._shape = 1, max(1, width // 128), width, min(width, 128)

    def hardware(self) -> Hardware:
        """All that is measured. Of disks nothing is."""
        hosts, pin_s = self._pinned()
        workspace_bytes = self._workspace_bytes()
        product_s = self._product_s()
        forward_s, backward_s = self._attention_s()
        out, back = (hosts[0], self._empty()), (self._empty(), hosts[1])
        d2h_slowdown, h2d_slowdown = self._slowdown(out), self._slowdown(back)
        (d2h,), (h2d,), both = (self.copy_rates(way) for way in ([out], [back], [out, back]))
        launch_s, gap_s = self._launch_s()
        flops = 2 * self._matrices[0].shape[0] ** 3
        return Hardware(
            name=self._name(),
            matmul_flops=flops / product_s,
            matmul_fraction=1.0,
            attention_fraction=min(1.0, product_s / forward_s),  # as many operations
            attention_backward_fraction=min(1.0, 2.5 * product_s / backward_s),
            memory_bytes_per_s=2 * self._nbytes / self._seconds(partial(back[0].copy_, out[1])),
            memory_fraction=1.0,
            memory_bytes=default_backend(self._device).memory_bytes() or _host_bytes(),
            link_bytes_per_s=d2h,
            h2d_bytes_per_s=h2d,
            both_links_bytes_per_s=min(both) if self._is_host else sum(both),
            d2h_slowdown=d2h_slowdown,
            h2d_slowdown=h2d_slowdown,
            launch_s=launch_s,
            kernel_gap_s=gap_s,
            copy_latency_s=1 / self.copy_rates([(out[0][:1], out[1][:1])], NUM_LAUNCHES)[0],
            pin_bytes_per_s=None if self._is_host else 2 * self._nbytes / pin_s,
            workspace_bytes=workspace_bytes,
        )

    def copy_rates(self, pairs: Sequence[Pair], num: int = NUM_COPIES) -> list[float]:
        """Bytes a second of copies at once, each on its own stream, in the best of some rounds.

        Args:
            pairs: Pinned memory and the device's.
            num: How many copies of each follow each other.
        """
        return max((self._rates(pairs, num) for _ in range(NUM_ROUNDS)), key=sum)

    def _rates(self, pairs: Sequence[Pair], num: int) -> list[float]:
        if self._is_host:
            return [a.nbytes / self._seconds(partial(a.copy_, b), num) for a, b in pairs]
        spans = [self._copies(pair, num) for pair in pairs]
        self._synchronize()
        milliseconds = [begin.elapsed_time(end) for begin, end in spans]
        return [num * a.nbytes / ms * 1e3 for (a, _), ms in zip(pairs, milliseconds, strict=True)]

    def _copies(self, pair: Pair, num: int) -> tuple[Any, Any]:
        """Launch them on a new stream; when they begin and end."""
        stream, events = torch.Stream(device=self._device), self._events()
        with stream:
            events[0].record(stream)
            for _ in range(num):
                pair[0].copy_(pair[1], non_blocking=True)
            events[1].record(stream)
        return events

    def _product_s(self) -> float:
        begin_s = time.perf_counter()
        while time.perf_counter() - begin_s < SUSTAINED_S:
            self._seconds(self._product, NUM_COPIES)
        return median(self._seconds(self._product, NUM_COPIES) for _ in range(NUM_ROUNDS))

    def _product(self) -> Tensor:
        return self._matrices[0] @ self._matrices[1]

    def _attention_s(self) -> tuple[float, float]:
        """Forward and backward of causal attention."""
        q, k, v = (self._random(*self._shape).requires_grad_() for _ in range(3))

        def forward() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        y = forward()
        gradient = torch.ones_like(y)

        def backward() -> object:
            return torch.autograd.grad(y, (q, k, v), gradient, retain_graph=True)

        both = (
            median(self._seconds(run) for _ in range(NUM_ROUNDS)) for run in (forward, backward)
        )
        forward_s, backward_s = both
        return forward_s, backward_s

    def _slowdown(self, pair: Pair) -> float:
        """The part of a product's speed that is lost beside copies, in rounds that take turns."""
        if self._is_host:
            return 0.0
        alone, beside = [], []
        for _ in range(NUM_ROUNDS):
            alone.append(self._seconds(self._product, NUM_COPIES))
            self._copies(pair, NUM_COPIES)  # which take longer than as many products
            beside.append(self._seconds(self._product, NUM_COPIES))
        return max(0.0, 1 - median(alone) / median(beside))

    def _launch_s(self) -> tuple[float, float]:
        """The host's time for a small operator, and the device's where the host is ahead."""
        x = self._empty()[:1]
        begin_s = time.perf_counter()
        for _ in range(NUM_LAUNCHES):
            x.zero_()
        launch_s = (time.perf_counter() - begin_s) / NUM_LAUNCHES
        if self._is_host:
            return launch_s, 0.0
        for _ in range(NUM_COPIES):
            self._product()  # until they have run, the host is ahead
        return launch_s, self._seconds(x.zero_, NUM_LAUNCHES)

    def _workspace_bytes(self) -> int:
        """What libraries take of the device for forward and backward, whose thread is another."""

        def allocated() -> int:
            now = default_backend(self._device).allocated()
            return 0 if now is None else now.nbytes

        before = allocated()
        x = self._matrices[0].detach().requires_grad_()
        (x @ self._matrices[1]).backward(self._matrices[1])
        x.grad = None
        return max(0, allocated() - before)

    def _pinned(self) -> tuple[list[Tensor], float]:
        """Memory of the host for each way, and how long it took to have it."""
        begin_s = time.perf_counter()
        hosts = [
            torch.empty(self._nbytes, dtype=torch.uint8, device="cpu", pin_memory=not self._is_host)
            for _ in range(2)
        ]
        return hosts, time.perf_counter() - begin_s

    def _seconds(self, work: Callable[[], object], num: int = 1) -> float:
        """How long the device works on one of some calls that follow each other."""
        if self._is_host:
            begin_s = time.perf_counter()
            for _ in range(num):
                work()
            return (time.perf_counter() - begin_s) / num
        begin, end = self._events()
        begin.record()
        for _ in range(num):
            work()
        end.record()
        self._synchronize()
        return max(begin.elapsed_time(end), 1e-3) / 1e3 / num

    def _events(self) -> tuple[Any, Any]:
        begin, end = (torch.Event(device=self._device, enable_timing=True) for _ in range(2))
        return begin, end

    def _synchronize(self) -> None:
        torch.accelerator.synchronize()

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device).to(torch.bfloat16)

    def _empty(self) -> Tensor:
        return torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)

    def _name(self) -> str:
        module: Any = None if self._is_host else torch.get_device_module(self._device)
        named = getattr(module, "get_device_name", None)
        return f"measured {self._device.type if named is None else named(self._device)}"


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
