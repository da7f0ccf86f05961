"""Streams, events, threads and memory of the emulated device behave as those of a device do."""

from __future__ import annotations

import threading
from types import ModuleType

import pytest
import torch
from torch import Tensor

from emulated.helpers import compute, late, some

pytestmark = pytest.mark.emulated

N = 4096
with_and_without = pytest.mark.parametrize("waits", [False, True])


# Each wait that a copy needs, left out: it comes out wrong, and right with its wait


@with_and_without
def test_a_copy_to_the_host_waits_for_compute(emulated: ModuleType, waits: bool) -> None:
    given, d2h = some(N), torch.Stream(device="emulated")
    x, host = given.to("emulated"), torch.zeros(N, pin_memory=True)
    with late(emulated, compute(), d2h):
        y = x * 2
        if waits:
            d2h.wait_event(compute().record_event())
        with d2h:
            host.copy_(y, non_blocking=True)
    assert host.equal(given * 2) is waits


@with_and_without
def test_compute_waits_for_a_reload(emulated: ModuleType, waits: bool) -> None:
    given, h2d = some(N), torch.Stream(device="emulated")
    host, target = given.pin_memory(), torch.zeros(N, device="emulated")
    with late(emulated, h2d, compute()):
        with h2d:
            target.copy_(host, non_blocking=True)
        if waits:
            compute().wait_event(h2d.record_event())
        result = target * 2
    assert result.cpu().equal(given * 2) is waits


@pytest.mark.parametrize("keeps", ["nothing", "a wait", "record_stream"])
def test_freed_memory_is_used_again_in_the_order_of_its_stream(
    emulated: ModuleType, keeps: str
) -> None:
    given, side = some(N), torch.Stream(device="emulated")
    x, result = given.to("emulated"), torch.zeros(N, device="emulated")
    with late(emulated, side, compute()):
        with side:
            torch.add(x, 0, out=result)
        if keeps == "a wait":
            compute().wait_event(side.record_event())
        if keeps == "record_stream":
            x.record_stream(side)
        del x
        torch.zeros(N, device="emulated")
    assert result.cpu().equal(given) is (keeps != "nothing")


# Streams, events and threads


def test_backward_runs_in_a_thread_of_autograd_on_the_stream_of_its_forward() -> None:
    seen: list[tuple[int, torch.Stream]] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            seen.append((threading.get_ident(), compute()))
            return grad

    side = torch.Stream(device="emulated")
    with side:
        y = Look.apply(torch.ones(2, device="emulated", requires_grad=True))
    y.sum().backward()
    ((thread, stream),) = seen
    assert thread != threading.get_ident()
    assert stream == side


# Memory


def test_memory_is_free_for_its_own_stream_at_once(emulated: ModuleType) -> None:
    x = torch.ones(N, device="emulated")
    address = x.data_ptr()
    with emulated.hold(compute()):
        y = x + 1
        del x
        z = torch.full((N,), 5.0, device="emulated")
        assert z.data_ptr() == address
    assert y.eq(2).all() and z.eq(5).all()
    assert torch.empty(N + 777, device="emulated").isnan().all(), "what is allocated holds poison"
