"""The engine on a virtual device: time obeys the law, and memory is spared."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.virtual_layers import FLOPS, NUM, hardware, step_s

from pp_offload.backends import Backend
from pp_offload.simulate import DEVICES, VirtualBackend


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
