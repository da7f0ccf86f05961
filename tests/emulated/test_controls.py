"""Each wait that a copy needs, left out: it comes out wrong, and right with its wait.

A closed gate makes one stream late. The others are drained while it is closed where the wait is
missing, so that no verdict depends on how fast a thread is.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from emulated.helpers import compute, late, some

pytestmark = pytest.mark.emulated

N = 4096
with_and_without = pytest.mark.parametrize("waits", [False, True])


@pytest.fixture
def d2h() -> torch.Stream:
    return torch.Stream(device="emulated")


@pytest.fixture
def h2d() -> torch.Stream:
    return torch.Stream(device="emulated")


def pinned(like: Tensor | None = None) -> Tensor:
    host = torch.zeros(N, pin_memory=True)
    return host if like is None else host.copy_(like)


def copy(stream: torch.Stream, target: Tensor, source: Tensor) -> torch.Event:
    with stream:
        target.copy_(source, non_blocking=True)
    return stream.record_event()


@with_and_without
def test_a_copy_to_the_host_waits_for_compute(
    emulated: ModuleType, d2h: torch.Stream, waits: bool
) -> None:
    given, host = some(N), pinned()
    x = given.to("emulated")
    with emulated.hold(compute()) as gate:
        y = x * 2
        if waits:
            d2h.wait_event(compute().record_event())
            gate.release()
        copy(d2h, host, y).synchronize()
    assert host.equal(given * 2) is waits


@with_and_without
def test_a_copy_to_the_device_waits_for_compute(
    emulated: ModuleType, h2d: torch.Stream, waits: bool
) -> None:
    """Its target is memory that compute, which is late, still reads for another tensor."""
    given, host = some(N), pinned(some(N))
    old = given.to("emulated")
    address = old.data_ptr()
    with emulated.hold(compute()) as gate:
        result = old * 2
        del old
        target = torch.empty(N, device="emulated")
        assert target.data_ptr() == address
        if waits:
            h2d.wait_event(compute().record_event())
            gate.release()
        copy(h2d, target, host).synchronize()
    compute().synchronize()
    assert result.cpu().equal(given * 2) is waits
    assert target.cpu().equal(host) is waits


@with_and_without
def test_a_copy_to_the_device_waits_for_the_offload(
    emulated: ModuleType, d2h: torch.Stream, h2d: torch.Stream, waits: bool
) -> None:
    given, host = some(N), pinned()
    x, target = given.to("emulated"), torch.zeros(N, device="emulated")
    with late(emulated, d2h, lambda: host.copy_(x, non_blocking=True)) as gate:
        if waits:
            h2d.wait_event(d2h.record_event())
            gate.release()
        copy(h2d, target, host).synchronize()
    assert target.cpu().equal(given) is waits


@with_and_without
def test_compute_waits_for_the_reload(emulated: ModuleType, h2d: torch.Stream, waits: bool) -> None:
    given = some(N)
    host, target = pinned(given), torch.zeros(N, device="emulated")
    with late(emulated, h2d, lambda: target.copy_(host, non_blocking=True)) as gate:
        if waits:
            compute().wait_event(h2d.record_event())
            gate.release()
        result = target * 2
        compute().synchronize()
    assert result.cpu().equal(given * 2) is waits


@with_and_without
def test_sources_live_until_they_are_copied(
    emulated: ModuleType, d2h: torch.Stream, waits: bool
) -> None:
    given, host = some(N), pinned()
    sources = [given.to("emulated")]
    with late(emulated, d2h, lambda: host.copy_(sources[0], non_blocking=True)) as gate:
        if waits:
            compute().wait_event(d2h.record_event())
            gate.release()
        sources.clear()
        compute().synchronize()
    assert host.equal(given) is waits
    assert bool(host.isnan().all()) is not waits


@with_and_without
def test_a_pinned_buffer_is_used_again_when_its_copy_is_through(
    emulated: ModuleType, h2d: torch.Stream, waits: bool
) -> None:
    given = some(N)
    host, target = pinned(given), torch.zeros(N, device="emulated")
    with late(emulated, h2d, lambda: target.copy_(host, non_blocking=True)) as gate:
        if waits:
            gate.release()
            h2d.synchronize()
        host.copy_(some(N))
    assert target.cpu().equal(given) is waits


@with_and_without
def test_the_host_reads_when_the_copy_is_through(
    emulated: ModuleType, d2h: torch.Stream, waits: bool
) -> None:
    given, host = some(N), pinned()
    x = given.to("emulated")
    with late(emulated, d2h, lambda: host.copy_(x, non_blocking=True)) as gate:
        if waits:
            gate.release()
            d2h.synchronize()
        seen = host.clone()
    assert seen.equal(given) is waits
