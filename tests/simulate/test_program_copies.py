"""Copies that the program makes itself run on the compute stream, and take the link."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from pp_offload.simulate import DEVICES, VirtualBackend

H100 = DEVICES["H100"]
NUMEL = 2**24
BYTES = NUMEL * 2
COPY_S = H100.copy_latency_s + BYTES / H100.link_bytes_per_s


def on_device() -> Tensor:
    return torch.empty(NUMEL, device="meta", dtype=torch.bfloat16)


def on_host() -> Tensor:
    return torch.empty(NUMEL, dtype=torch.bfloat16)


OUT: dict[str, Callable[[], Tensor]] = {
    "cpu": lambda: on_device().cpu(),
    "to": lambda: on_device().to("cpu"),
    "copy_": lambda: on_host().copy_(on_device()),
}
BACK: dict[str, Callable[[], Tensor]] = {
    "to": lambda: on_host().to("meta"),
    "copy_": lambda: on_device().copy_(on_host()),
}


@pytest.mark.parametrize("way", OUT)
def test_one_to_the_host_takes_its_bytes_and_the_host_waits(way: str) -> None:
    backend = VirtualBackend(H100)
    with backend.activate():
        found = OUT[way]()
    assert found.device.type == "cpu" and found.nbytes == BYTES
    assert backend.compute.busy_s == pytest.approx(COPY_S)
    assert backend.host.now_s == backend.compute.free_at_s
    assert (backend.link.bytes_to_host, backend.link.bytes_to_device) == (BYTES, 0)


@pytest.mark.parametrize("way", BACK)
def test_one_to_the_device_takes_its_bytes_and_memory(way: str) -> None:
    backend = VirtualBackend(H100)
    with backend.activate():
        found = BACK[way]()
    assert found.is_meta
    assert backend.compute.busy_s == pytest.approx(COPY_S)
    assert (backend.link.bytes_to_host, backend.link.bytes_to_device) == (0, BYTES)
    assert backend.memory.live_bytes == BYTES


def test_the_host_does_not_wait_where_it_is_told_so() -> None:
    backend = VirtualBackend(H100)
    with backend.activate():
        on_host().copy_(on_device(), non_blocking=True)
        on_device().to("cpu", non_blocking=True)
    assert backend.host.now_s == pytest.approx(2 * H100.launch_s)
    assert backend.compute.busy_s == pytest.approx(2 * COPY_S)


def test_what_stays_on_its_side_takes_no_link() -> None:
    backend = VirtualBackend(H100)
    with backend.activate():
        on_device().copy_(on_device())
        on_device().float()
        on_host().copy_(on_host())
    assert backend.link.bytes_to_host == backend.link.bytes_to_device == 0


def test_a_copy_keeps_size_strides_and_dtype() -> None:
    with VirtualBackend(H100).activate():
        x = torch.empty(4, 6, device="meta").t()
        y = x.to("cpu", torch.bfloat16)
        assert (y.shape, y.stride(), y.dtype) == ((6, 4), (1, 6), torch.bfloat16)
        assert torch.empty(0, device="meta").cpu().shape == (0,)


def test_save_on_cpu_moves_what_autograd_saves_there_and_back() -> None:
    backend = VirtualBackend(H100)
    with backend.activate():
        x = on_device().requires_grad_()
        with save_on_cpu(pin_memory=True):
            y = x.sin()
        assert (backend.link.bytes_to_host, backend.link.bytes_to_device) == (BYTES, 0)
        y.backward(torch.empty_like(y))
    assert backend.link.bytes_to_device == BYTES
    assert x.grad is not None


def test_the_copies_of_the_engine_are_counted_by_direction() -> None:
    backend = VirtualBackend(H100)
    host = backend.allocate_host(1000)
    device = torch.empty(1000, device="meta", dtype=torch.uint8)
    backend.copy(backend.d2h, [host], [device], "out")
    backend.copy(backend.h2d, [device, device], [host, host], "back")
    assert (backend.link.bytes_to_host, backend.link.bytes_to_device) == (1000, 2000)
