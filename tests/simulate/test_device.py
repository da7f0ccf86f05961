"""The engine on a virtual device: the bytes are those of a real run, and time obeys the law."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import make_backend
from helpers.toy import batches, make_model, run_step
from helpers.virtual_layers import FLOPS, NUM, SAVED_BYTES, hardware, step_s

from pp_offload import OffloadConfig, use_backend
from pp_offload.backends import Backend
from pp_offload.simulate import DEVICES, VirtualBackend

COUNTED = ("bytes_offloaded", "bytes_reloaded", "host_bytes_peak")


@pytest.mark.parametrize("in_flight", [1, 3])
def test_what_moves_is_what_moves_with_data(in_flight: int) -> None:
    counts = []
    for backend in (make_backend("late"), VirtualBackend(DEVICES["H100"])):
        config = OffloadConfig(
            device_limit_bytes=None, min_offloaded_tensor_size=1, max_in_flight_bytes=0
        )
        with use_backend(backend, config=config) as manager:
            model = make_model(width=64, device=str(backend.device))
            for step in range(3):
                inputs = [x.to(backend.device) for x in batches(5, 64, step)]
                run_step(model, inputs, in_flight=in_flight)
            statistics = manager.statistics()
            counts.append({name: getattr(statistics, name) for name in COUNTED})
    assert counts[0] == counts[1]
    assert counts[0]["bytes_offloaded"] > 0


@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_link_that_is_fast_enough_costs_nothing_and_saves_memory(in_flight: int) -> None:
    """One stage needs its copies in a forward's time; microbatches in turn have a step's."""
    machine = hardware(0.8 if in_flight == 1 else 2.0)
    none_s, none_bytes = step_s(machine, offload=False, in_flight=in_flight)
    window = 6 if in_flight == 1 else 12
    ours_s, ours_bytes = step_s(machine, offload=True, in_flight=in_flight, window=window)
    assert none_s == pytest.approx(NUM * 3 * FLOPS / (990e12 * 0.6), rel=0.05)
    assert ours_s / none_s < 1.03
    assert ours_bytes < none_bytes


def test_a_link_that_is_too_slow_takes_its_own_time() -> None:
    """Each layer's bytes leave once in a step, and nothing else can be as slow."""
    machine = hardware(6.0)
    link_s = NUM * SAVED_BYTES / machine.link_bytes_per_s
    ours_s, _ = step_s(machine, offload=True, in_flight=3, window=NUM)
    assert link_s <= ours_s <= 1.1 * link_s
    assert step_s(machine, offload=True, in_flight=3, window=6)[0] > ours_s, "a small window stalls"


def test_a_host_that_waits_for_operators_has_the_lower_peak() -> None:
    """What was copied is free as soon as the host sees it; one that is ahead sees it late."""
    machine = hardware(0.8)
    ahead_s, ahead_bytes = step_s(machine, offload=True, in_flight=3)
    waits_s, waits_bytes = step_s(machine, offload=True, in_flight=3, is_blocking=True)
    assert waits_bytes < ahead_bytes
    assert waits_s > ahead_s, "each launch is on its way"
    further = replace(machine, num_queued_launches=10**9, launch_s=0)
    assert step_s(further, offload=True, in_flight=3)[1] >= ahead_bytes


def test_it_is_a_backend_with_streams() -> None:
    backend = VirtualBackend(DEVICES["H100"])
    assert isinstance(backend, Backend)
    assert backend.allocate_host(2**36).nbytes == 2**36, "addresses, and no memory"
    side = backend.new_stream("side")
    with backend.stream(side):
        assert backend.current_stream() is side
        side.launch(1.0)
    assert backend.current_stream() is backend.compute
    assert backend.seconds > 1.0, "though nobody is on that stream any more"
    assert backend.host.now_s < 1.0
    backend.synchronize()
    assert backend.host.now_s == backend.seconds
