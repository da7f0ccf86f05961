"""Streams, the link and memory in closed forms: when work ends, and what copies cost compute."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor

from pp_offload.simulate import DEVICES, VirtualBackend
from pp_offload.simulate.clocks import HostClock, VirtualStream
from pp_offload.simulate.link import Link
from pp_offload.simulate.memory import ROUNDING_BYTES, DeviceMemory

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
    assert [copies.launch(way, 10) for way in ways.split(",")] == pytest.approx(ends)
    num_back = ways.count("back")
    moved = copies.link.bytes_to_host, copies.link.bytes_to_device
    assert moved == (10 * (len(ends) - num_back), 10 * num_back)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("both", [1.0, 1.3, 1.9])
def test_no_more_bytes_move_than_the_link_can(seed: int, both: float) -> None:
    draw = random.Random(seed)
    copies, launched = Copies(both_links_bytes_per_s=both), []
    for _ in range(60):
        way, nbytes = draw.choice(["out", "back"]), draw.randrange(1, 20)
        launched.append((way, copies.launch(way, nbytes), nbytes))
    for _, end, _ in launched:
        for ways, rate in ((("out",), 1.0), (("back",), 1.0), (("out", "back"), both)):
            moved = sum(nbytes for way, done, nbytes in launched if way in ways and done <= end)
            assert moved <= rate * end * (1 + 1e-9)
    if both == 1.0:  # as long as both directions have something to do, the link never idles
        total = sum(nbytes for _, _, nbytes in launched)
        assert max(end for _, end, _ in launched) == pytest.approx(total)


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
    assert backend.compute.busy_s == pytest.approx(COPY_S)
    host_s = backend.compute.free_at_s if blocks else H100.launch_s
    assert backend.host.now_s == pytest.approx(host_s)
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
