"""Measured rates of a device, and the cost of launches and pinning, as ``Hardware``.

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

from pp_offload._core.observers import time_of
from pp_offload.backends import default_backend
from pp_offload.simulate import Hardware

SUSTAINED_S = 1.0
"""Time of products before they are timed: clocks fall when a device is hot."""

NUM_ROUNDS, NUM_COPIES, NUM_LAUNCHES = 5, 8, 200

Pair = tuple[Tensor, Tensor]
"""A target and a source."""


class DeviceSpeed:
    """Measurement of a device. On the CPU copies do not run beside compute. A copy has ``nbytes``,
    at least 4 KiB; matrices are at most a quarter as large, on the CPU less.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes
        self._backend = default_backend(device)
        self._is_host = self._backend.is_host
        if self._is_host:
            nbytes = min(nbytes, 2**22)  # larger products take minutes
        self._width = 2 ** (((nbytes // 8).bit_length() - 1) // 2)
        self._matrices = [self._random(self._width, self._width) for _ in range(2)]

    def hardware(self) -> Hardware:
        """Measure all figures."""
        begin_s = time.perf_counter()
        hosts = [self._backend.allocate_host(self._nbytes) for _ in range(2)]
        pin_s = time.perf_counter() - begin_s
        workspace_bytes = self._workspace_bytes()
        product_s = self._product_s()
        forward_s, backward_s = self._attention_s()
        out, back = (hosts[0], self._empty()), (self._empty(), hosts[1])
        d2h_slowdown, h2d_slowdown = self._slowdown(out), self._slowdown(back)
        (d2h,), (h2d,), both = (self.copy_rates(way) for way in ([out], [back], [out, back]))
        launch_s, gap_s = self._launch_s()
        module: Any = None if self._is_host else torch.get_device_module(self._device)
        name = getattr(module, "get_device_name", lambda device: device.type)(self._device)
        host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Hardware(
            name=f"measured {name}",
            matmul_flops=2 * self._width**3 / product_s,
            matmul_fraction=1.0,
            attention_fraction=min(1.0, product_s / forward_s),  # the same number of operations
            attention_backward_fraction=min(1.0, 2.5 * product_s / backward_s),
            memory_bytes_per_s=2 * self._nbytes / self._seconds(partial(back[0].copy_, out[1])),
            memory_fraction=1.0,
            memory_bytes=self._backend.memory_bytes() or host_bytes,
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
        """Measure bytes a second of ``num`` copies of each pair, each pair on its own stream.

        Return the best of some rounds.
        """
        return max((self._rates(pairs, num) for _ in range(NUM_ROUNDS)), key=sum)

    def _rates(self, pairs: Sequence[Pair], num: int) -> list[float]:
        if self._is_host:
            return [a.nbytes / self._seconds(partial(a.copy_, b), num) for a, b in pairs]
        spans = self._copies(pairs, num)
        torch.accelerator.synchronize()
        milliseconds = [begin.elapsed_time(end) for begin, end in spans]
        return [num * a.nbytes / ms * 1e3 for (a, _), ms in zip(pairs, milliseconds, strict=True)]

    def _copies(self, pairs: Sequence[Pair], num: int) -> list[Any]:
        """Launch copies, and return their begin and end events."""
        spans, streams = [], (self._backend.d2h, self._backend.h2d)
        for (target, source), stream in zip(pairs, streams, strict=False):
            begin = time_of(self._backend, stream)
            self._backend.copy(stream, [target] * num, [source] * num, "")
            spans.append((begin, time_of(self._backend, stream)))
        return spans

    def _seconds(self, work: Callable[[], object], num: int = 1) -> float:
        """Measure the device's time for each of ``num`` calls in a row."""
        begin: Any = time_of(self._backend, self._backend.current_stream())
        for _ in range(num):
            work()
        end = time_of(self._backend, self._backend.current_stream())
        if not self._is_host:
            torch.accelerator.synchronize()
        return max(begin.elapsed_time(end), 1e-3) / 1e3 / num

    def _median_s(self, work: Callable[[], object], num: int = 1) -> float:
        return median(self._seconds(work, num) for _ in range(NUM_ROUNDS))

    def _product(self) -> Tensor:
        return self._matrices[0] @ self._matrices[1]

    def _product_s(self) -> float:
        begin_s = time.perf_counter()
        while time.perf_counter() - begin_s < SUSTAINED_S:
            self._seconds(self._product, NUM_COPIES)
        return self._median_s(self._product, NUM_COPIES)

    def _attention_s(self) -> tuple[float, float]:
        """Measure forward and backward of causal attention."""
        shape = 1, max(1, self._width // 128), self._width, min(self._width, 128)
        q, k, v = (self._random(*shape).requires_grad_() for _ in range(3))
        forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        y = forward()
        backward = partial(torch.autograd.grad, y, (q, k, v), torch.ones_like(y), retain_graph=True)
        return self._median_s(forward), self._median_s(backward)

    def _slowdown(self, pair: Pair) -> float:
        """Measure the part of a product's speed lost beside copies."""
        if self._is_host:
            return 0.0
        alone, beside = [], []
        for _ in range(NUM_ROUNDS):
            alone.append(self._seconds(self._product, NUM_COPIES))
            self._copies([pair], NUM_COPIES)  # longer than the same number of products
            beside.append(self._seconds(self._product, NUM_COPIES))
        return max(0.0, 1 - median(alone) / median(beside))

    def _launch_s(self) -> tuple[float, float]:
        """Measure the time of a small operator on the host, and on the device after it."""
        x = self._empty()[:1]
        begin_s = time.perf_counter()
        for _ in range(NUM_LAUNCHES):
            x.zero_()
        launch_s = (time.perf_counter() - begin_s) / NUM_LAUNCHES
        if self._is_host:
            return launch_s, 0.0
        for _ in range(NUM_COPIES):
            self._product()  # until these have run, the host is ahead
        return launch_s, self._seconds(x.zero_, NUM_LAUNCHES)

    def _workspace_bytes(self) -> int:
        """Measure the device memory that libraries take for forward and backward."""
        before = self._backend.allocated()
        x = self._matrices[0].detach().requires_grad_()
        (x @ self._matrices[1]).backward(self._matrices[1])
        x.grad = None
        after = self._backend.allocated()
        return max(0, after.nbytes - before.nbytes) if before and after else 0

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device).to(torch.bfloat16)

    def _empty(self) -> Tensor:
        return torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
