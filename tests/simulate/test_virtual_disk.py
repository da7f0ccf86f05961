"""The disk tier on a virtual device: what goes there takes the time of a disk."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_backend
from helpers.toy import batches, make_model, run_step
from helpers.virtual_layers import FLOPS, NUM, SAVED_BYTES, step_s

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, use_backend
from pp_offload._core.engine import Engine
from pp_offload._core.saved import Saved
from pp_offload._groups.offloader import Offloader
from pp_offload.simulate import DEVICES, Hardware, VirtualBackend
from pp_offload.trace import Trace

MB = 10**6
BYTES = 4 * MB
PLAIN = replace(
    DEVICES["H100"],
    launch_s=0,
    copy_latency_s=0,
    link_bytes_per_s=4 * MB,
    disk_write_bytes_per_s=1 * MB,
    disk_read_bytes_per_s=2 * MB,
    disk_latency_s=0,
)
"""A copy of ``BYTES`` takes 1 s, a write 4 s, a read 2 s."""


def engine_on(hardware: Hardware, **options: Any) -> tuple[VirtualBackend, Engine]:
    backend = VirtualBackend(hardware)
    config = OffloadConfig(device_limit_bytes=None, tiers=("disk",), **options)
    return backend, Offloader(backend, config).engine


def sent(engine: Engine) -> Saved:
    return engine.offload(torch.empty(BYTES, dtype=torch.uint8, device="meta"))


def at(backend: VirtualBackend, engine: Engine, time_s: float) -> None:
    """The host comes to that time, and the engine looks at what has ended."""
    backend.host.wait_until(time_s)
    engine.mover.poll()


def staged(engine: Engine) -> int:
    return sum(pool.in_use_bytes for pool in engine.mover.tier.pools)


def test_there_and_back() -> None:
    """Copied until 1 s, written until 5, read from 10 to 12, copied until 13."""
    backend, engine = engine_on(PLAIN)
    with backend.activate():
        saved = sent(engine)
        assert (backend.disk.busy_s, backend.disk.free_at_s) == (4.0, 5.0)
        at(backend, engine, 4.9)
        assert staged(engine) == BYTES
        at(backend, engine, 5.0)
        assert staged(engine) == 0
        at(backend, engine, 10.0)
        saved.unpack()
        assert backend.host.now_s == 12.0, "the host waits for the read"
        assert backend.compute.launch(0.0) == 13.0
        assert (backend.disk.busy_s, backend.disk.free_at_s) == (6.0, 12.0)


def test_writes_and_reads_share_the_disk() -> None:
    """The second write keeps the read of the first waiting."""
    backend, engine = engine_on(PLAIN)
    with backend.activate():
        first = sent(engine)
        second = sent(engine)
        at(backend, engine, 1.0)  # the first is written until 5
        at(backend, engine, 2.0)  # the second until 9
        at(backend, engine, 5.0)
        first.unpack()
        assert backend.host.now_s == 11.0
        del second


def test_what_passes_through_is_bounded() -> None:
    """Of four groups, as many bytes as two may be on the way: the host waits for the disk."""
    backend, engine = engine_on(PLAIN, max_in_flight_bytes=2 * BYTES)
    most = 0
    with backend.activate():
        living = []
        for _ in range(4):
            living.append(sent(engine))
            most = max(most, staged(engine))
    assert most == 2 * BYTES
    assert backend.host.now_s >= 9.0, "two have been written"


FORWARD_S = FLOPS / (990e12 * 0.6)
INSTANT = replace(DEVICES["H100"], link_bytes_per_s=inf, copy_latency_s=0, disk_latency_s=0)


@pytest.mark.parametrize(("rate", "least_s"), [(inf, 3 * NUM * FORWARD_S), (None, None)])
def test_a_step_takes_as_long_as_its_disk(rate: float | None, least_s: float | None) -> None:
    """The host waits for staging buffers and is less far ahead then."""
    rate = rate or SAVED_BYTES / (24 * FORWARD_S)  # slow: writes and reads bound the step
    least_s = least_s or 2 * NUM * 24 * FORWARD_S
    disk = replace(INSTANT, disk_write_bytes_per_s=rate, disk_read_bytes_per_s=rate)
    seconds, _ = step_s(disk, offload=True, in_flight=3, window=4, tiers=("disk",))
    assert 0.97 <= seconds / least_s < 1.06


def test_what_moves_is_what_moves_with_data(tmp_path: Path) -> None:
    results = []
    for backend in (make_backend("eager"), VirtualBackend(replace(PLAIN, link_bytes_per_s=inf))):
        config = OffloadConfig(
            device_limit_bytes=None, min_offloaded_tensor_size=1, tiers=("disk",), disk_dir=tmp_path
        )
        with use_backend(backend, config=config) as manager:
            model = make_model(width=64, device=str(backend.device))
            forwards = []
            for step in range(2):
                inputs = [x.to(backend.device) for x in batches(3, 64, step)]
                run_step(model, inputs, in_flight=2)
                forwards.append(manager.statistics().bytes_offloaded)
            results.append((forwards, manager.statistics().disk_bytes_in_use))
    assert results[0] == results[1]
    assert results[0][0][-1] > 0 and results[0][1] == 0


def test_a_trace_shows_it_by_the_same_clock(tmp_path: Path) -> None:
    config = OffloadConfig(
        device_limit_bytes=None, min_offloaded_tensor_size=1, tiers=("disk",), disk_dir=tmp_path
    )
    with use_backend(VirtualBackend(PLAIN), config=config) as manager:
        backend = manager.backend
        assert isinstance(backend, VirtualBackend)
        with Trace(tmp_path / "out.json") as trace:
            off_interface.init_chunk_handler(None, None, 1)
            x = torch.empty(BYTES // 4, device="meta", requires_grad=True)
            with off_interface(True, x, "g"):
                y = x.sin()
            y = off_interface.group_commit(y, name="g")
            backend.host.wait_until(6.0)
        assert trace.timeline is not None
        (copy,), (span,) = trace.timeline.of(0, "d2h"), trace.timeline.of(0, "disk")
    assert (span.name, span.args["bytes"]) == ("write", BYTES)
    assert (span.begin_s, span.end_s) == pytest.approx((copy.end_s, copy.end_s + 4.0), rel=1e-12)
