"""When launched work begins and ends, in closed forms."""

from __future__ import annotations

from dataclasses import replace

from pp_offload.simulate import DEVICES
from pp_offload.simulate.clocks import HostClock, VirtualStream


def device(
    launch_s: float = 1.0, num_queued_launches: int = 1000
) -> tuple[HostClock, VirtualStream, VirtualStream]:
    hardware = replace(DEVICES["H100"], launch_s=launch_s, num_queued_launches=num_queued_launches)
    host = HostClock(hardware)
    return host, VirtualStream(host), VirtualStream(host)


def test_the_host_goes_on_and_the_stream_works() -> None:
    host, compute, _ = device()
    assert compute.launch(10.0) == 11.0
    assert compute.launch(10.0) == 21.0, "behind the first"
    assert host.now_s == 2.0
    assert (compute.busy_s, compute.stalled_s) == (20.0, 0.0)


def test_a_slow_host_leaves_gaps_that_are_no_stall() -> None:
    _, compute, _ = device(launch_s=5.0)
    ends = [compute.launch(1.0) for _ in range(3)]
    assert ends == [6.0, 11.0, 16.0]
    assert compute.stalled_s == 0.0


def test_streams_run_beside_each_other_and_wait_for_events() -> None:
    host, compute, d2h = device()
    compute.launch(10.0)
    made = compute.record_event()
    d2h.wait_event(made)
    assert d2h.launch(4.0) == 15.0, "from 11 on"
    assert compute.launch(4.0) == 15.0, "at the same time"
    assert d2h.stalled_s == 9.0, "from 2, when it was launched, to 11"
    assert not made.query()
    made.synchronize()
    assert made.query() and host.now_s == 11.0


def test_the_host_waits_where_the_queue_of_launches_is_full() -> None:
    host, compute, _ = device(num_queued_launches=2)
    for _ in range(3):
        compute.launch(10.0)
    assert host.now_s == 11.0, "until the first of three had ended"
