"""Memory of the emulated device: what is freed too early comes out as poison."""

from __future__ import annotations

import ctypes
from types import ModuleType

import pytest
import torch

from emulated.helpers import compute, late, some

pytestmark = pytest.mark.emulated

N = 4096


@pytest.mark.parametrize("keeps", ["nothing", "a wait", "record_stream"])
def test_freed_memory_is_poisoned_in_the_order_of_its_stream(
    emulated: ModuleType, keeps: str
) -> None:
    given, side = some(N), torch.Stream(device="emulated")
    xs, result = [given.to("emulated")], torch.zeros(N, device="emulated")
    with late(emulated, side, lambda: torch.add(xs[0], 0, out=result)) as gate:
        if keeps == "a wait":
            compute().wait_event(side.record_event())
            gate.release()
        if keeps == "record_stream":
            xs[0].record_stream(side)
        xs.clear()
        compute().synchronize()
    emulated.synchronize()
    assert result.cpu().equal(given) is (keeps != "nothing")
    assert bool(result.isnan().all()) is (keeps == "nothing")


def test_memory_is_free_for_its_own_stream_at_once(emulated: ModuleType) -> None:
    x = torch.ones(N, device="emulated")
    address = x.data_ptr()
    with emulated.hold(compute()):
        y = x + 1
        del x
        z = torch.full((N,), 5.0, device="emulated")
        assert z.data_ptr() == address
    assert y.eq(2).all() and z.eq(5).all()


def test_memory_recorded_on_another_stream_is_free_when_that_is_through(
    emulated: ModuleType,
) -> None:
    side = torch.Stream(device="emulated")
    x = torch.ones(N, device="emulated")
    address = x.data_ptr()
    with emulated.hold(side):
        x.record_stream(side)
        del x
        kept = torch.empty(N, device="emulated")
        assert kept.data_ptr() != address
    side.synchronize()
    assert torch.empty(N, device="emulated").data_ptr() == address


def test_what_is_allocated_holds_poison() -> None:
    assert torch.empty(N + 777, device="emulated").isnan().all()


def test_memory_is_counted(emulated: ModuleType) -> None:
    emulated.empty_cache()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    x = torch.empty(1024, device="emulated")
    assert torch.accelerator.memory_allocated() - before == 4096
    del x
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() - before == 4096
    reserved = torch.accelerator.memory_reserved()
    emulated.empty_cache()
    assert reserved - torch.accelerator.memory_reserved() >= 4096


@pytest.mark.parametrize("to_device", [False, True])
def test_pinned_memory_is_used_again_when_its_copy_is_through(
    emulated: ModuleType, to_device: bool
) -> None:
    torch.accelerator.empty_host_cache()
    pinned, on_device = torch.empty(N, pin_memory=True), torch.ones(N, device="emulated")
    address = pinned.data_ptr()
    assert pinned.is_pinned() and not torch.empty(N).is_pinned()
    with emulated.hold(compute()):
        left, right = (on_device, pinned) if to_device else (pinned, on_device)
        left.copy_(right, non_blocking=True)
        del pinned, left, right
        other = torch.empty(N, pin_memory=True)
        assert other.data_ptr() != address
    compute().synchronize()
    assert torch.empty(N, pin_memory=True).data_ptr() == address


def test_pageable_memory_is_read_before_the_copy_returns(emulated: ModuleType) -> None:
    given = some(N)
    source = given.clone()
    with emulated.hold(compute()):
        x = source.to("emulated", non_blocking=True)
        source.fill_(7)
    assert x.cpu().equal(given)


def test_pinned_memory_that_went_back_is_poisoned() -> None:
    pinned = torch.ones(N, pin_memory=True)
    address = pinned.data_ptr()
    alias = torch.frombuffer((ctypes.c_float * N).from_address(address), dtype=torch.float)
    del pinned
    torch.accelerator.empty_host_cache()
    assert alias.isnan().all()


def test_poison_comes_behind_a_wait_that_comes_behind_the_free(emulated: ModuleType) -> None:
    """As a backward over several streams does: the owner waits before it launches anything."""
    given, side = some(N), torch.Stream(device="emulated")
    xs, result = [given.to("emulated")], torch.zeros(N, device="emulated")
    with late(emulated, side, lambda: torch.add(xs[0], 0, out=result)) as gate:
        xs.clear()
        compute().wait_event(side.record_event())
        torch.zeros(N, device="emulated")
        gate.release()
    emulated.synchronize()
    assert result.cpu().equal(given)
