"""A trace of a virtual run says what the device's streams did, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_device import FLOPS, ROWS, SAVED_BYTES, WIDTH, Layers, hardware
from toy import batches, make_model, run_step

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, use_backend
from pp_offload.simulate import DEVICES, VirtualBackend
from pp_offload.trace import Span, Timeline, Trace, read


FORWARD_S = FLOPS / (990e12 * 0.6)


def tiny() -> Any:
    """A layer's copy takes 2.5 of its forwards, and nothing else takes time."""
    return replace(hardware(2.5), launch_s=0, copy_latency_s=0)


def three_layers(path: Path) -> Timeline:
    """Forward and backward of three layers, on a host that sees every operator end. One may be on
    its way to the host.
    """
    backend = VirtualBackend(tiny(), is_blocking=True)
    config = OffloadConfig(max_in_flight_bytes=SAVED_BYTES, prefetch_bytes=2**30)
    with use_backend(backend, config=config):
        model = Layers(3, WIDTH)
        with Trace(path) as trace:
            off_interface.reset()
            off_interface.init_chunk_handler(None, None, 1)
            x = torch.empty(ROWS, WIDTH, device="meta", dtype=torch.bfloat16, requires_grad=True)
            y = model(x, offload=True)
            y.backward(torch.empty_like(y))
    assert trace.timeline is not None
    return trace.timeline


def forwards_at(timeline: Timeline, time_s: float) -> float:
    """A time of the step, in forwards of a layer; before it, the parameters were filled."""
    begin_s = timeline.of(0, "steps")[0].begin_s
    return round((time_s - begin_s) / FORWARD_S, 9)


def on(timeline: Timeline, track: str) -> list[tuple[str, float, float]]:
    """Names, begins and ends of spans, in forwards of a layer."""
    return [
        (one.name, forwards_at(timeline, one.begin_s), forwards_at(timeline, one.end_s))
        for one in timeline.of(0, track)
    ]


def test_three_layers_take_what_a_hand_computes(tmp_path: Path) -> None:
    """Compute waits for a copy before another group may leave. Layer 2 is taken back, for its copy
    has not ended when backward asks for it; the others come back, each a bit late.
    """
    timeline = three_layers(tmp_path / "out.json")
    assert {track: on(timeline, track) for track in ("d2h", "h2d")} == {
        "d2h": [
            ("layer (offload)", 1, 3.5),
            ("layer (offload)", 3.5, 6),
            ("layer (offload)", 6, 8.5),
        ],
        "h2d": [("layer (reload)", 6, 8.5), ("layer (reload)", 8.5, 11)],
    }
    assert on(timeline, "compute") == [
        ("layer (forward)", 0, 1),
        ("layer (forward)", 1, 3.5),
        ("waits for layer (offload)", 2, 3.5),
        ("layer (forward)", 3.5, 6),
        ("waits for layer (offload)", 4.5, 6),
        ("layer (backward)", 6, 8),
        ("layer (backward)", 8, 10.5),
        ("waits for layer (reload)", 8, 8.5),
        ("layer (backward)", 10.5, 13),
        ("waits for layer (reload)", 10.5, 11),
    ]
    assert on(timeline, "operators") == [
        ("operators", 0, 2),
        ("operators", 3.5, 4.5),
        ("operators", 6, 8),
        ("operators", 8.5, 10.5),
        ("operators", 11, 13),
    ]
    assert on(timeline, "steps") == [("step 0", 0, 13)]
    assert [one.args["bytes"] for one in timeline.of(0, "d2h")] == [SAVED_BYTES] * 3
    first = timeline.of(0, "compute")[0].args
    expected = {"microbatch": 0, "vp_stage": 0, "position": 0, "state": "offloaded"}
    assert first == expected | {"bytes": SAVED_BYTES}


def test_flows_go_from_a_copy_to_its_reload_to_its_use(tmp_path: Path) -> None:
    timeline = three_layers(tmp_path / "out.json")
    found = [
        [(point.track, forwards_at(timeline, point.time_s)) for point in flow.points]
        for flow in timeline.flows
    ]
    assert found == [
        [("d2h", 3.5), ("h2d", 6), ("compute", 8.5)],
        [("d2h", 1), ("h2d", 8.5), ("compute", 11)],
    ]


def test_counters_follow_the_bytes(tmp_path: Path) -> None:
    timeline = three_layers(tmp_path / "out.json")
    in_flight = [
        (forwards_at(timeline, one.time_s), one.nbytes // SAVED_BYTES)
        for one in timeline.counter(0, "in flight")
    ]
    assert in_flight == [(0, 0), (1, 1)], "and as one leaves, the one before has left"
    host = [one.nbytes // SAVED_BYTES for one in timeline.counter(0, "host")]
    assert max(host) == 3 and host[0] == 0
    device = [one.nbytes for one in timeline.counter(0, "device")]
    assert min(device) >= 3 * WIDTH * WIDTH * 2, "the parameters"


def busy_s(spans: list[Span]) -> float:
    return sum(span.args.get("busy_s", span.end_s - span.begin_s) for span in spans)


def test_what_spans_add_up_to_is_what_the_streams_count(tmp_path: Path) -> None:
    """Also where the host is late, and where many small copies are queued together."""
    backend = VirtualBackend(DEVICES["H100"])
    with use_backend(backend, config=OffloadConfig(min_offloaded_tensor_size=1)):
        model = make_model(width=512, device="meta")
        compute, d2h, h2d = (backend.compute, backend.d2h, backend.h2d)
        busy, stalled = compute.busy_s, compute.stalled_s
        with Trace(tmp_path / "out.json.gz") as trace:
            for step in range(3):
                run_step(model, [x.to("meta") for x in batches(4, 512, step, 4096)], in_flight=2)
    timeline = trace.timeline
    assert timeline is not None and d2h.busy_s > 0
    waits = [one for one in timeline.of(0, "compute") if one.name.startswith("waits for")]
    assert {one.name for one in waits} == {
        "waits for mix (offload)",
        "waits for mix (reload)",
        "waits for mlp (offload)",
    }
    assert busy_s(waits) == pytest.approx(compute.stalled_s - stalled, rel=1e-12)
    assert busy_s(timeline.of(0, "operators")) == pytest.approx(compute.busy_s - busy, rel=1e-12)
    assert busy_s(timeline.of(0, "d2h")) == pytest.approx(d2h.busy_s, rel=1e-12)
    assert busy_s(timeline.of(0, "h2d")) == pytest.approx(h2d.busy_s, rel=1e-12)
    for track in ("operators", "d2h", "h2d", "steps"):
        spans = timeline.of(0, track)
        both = zip(spans, spans[1:], strict=False)
        assert all(one.end_s <= two.begin_s for one, two in both), "one stream, one after another"


def test_a_wait_is_shown_as_far_as_work_waited() -> None:
    """A host that is late launches work when some of the wait is over, and messages are others'."""
    backend = VirtualBackend(DEVICES["H100"])
    begin, room = backend.timed_event(backend.compute), Room(9)
    notes = VirtualCopyNotes(begin, room, Lanes(backend), backend)
    hears = backend.compute.heard[-1]
    notes._waits = [_Wait("mlp", 1.0, 3.0), _Wait("attn", 5.0, 9.0)]
    hears(2.0, 7.0, 8.0)
    assert notes.stalls == [
        Stall("mlp", 2.0, 3.0),
        Stall(OTHER_WORK, 3.0, 5.0),
        Stall("attn", 5.0, 7.0),
    ]
    hears(8.0, 8.0, 9.0)
    hears(10.0, 11.0, 12.0)
    assert notes.stalls[3:] == [Stall(OTHER_WORK, 10.0, 11.0)], "a wait counts once"
    assert [(work.begin_s, work.end_s) for work in notes.operators] == [(7, 9), (11, 12)]


def test_a_trace_changes_no_time_and_no_peak(tmp_path: Path) -> None:
    found = []
    for is_traced in (False, True):
        backend = VirtualBackend(DEVICES["H100"])
        with use_backend(backend, config=OffloadConfig(min_offloaded_tensor_size=1)) as manager:
            model = make_model(width=512, device="meta")
            trace = Trace(tmp_path / "out.json.gz", steps=range(1, 3))
            if is_traced:
                trace.__enter__()
            for step in range(5):
                run_step(model, [x.to("meta") for x in batches(4, 512, step, 4096)], in_flight=2)
            bounds = manager.bounds.now
            found.append((backend.seconds, backend.memory.peak_bytes, bounds))
            found[-1] = (*found[-1], manager.statistics())  # type: ignore[assignment]
            trace.__exit__(None, None, None)
            assert (trace.timeline is not None) is is_traced
    assert found[0] == found[1]


def test_nobody_listens_to_the_streams_when_it_is_over(tmp_path: Path) -> None:
    backend = VirtualBackend(DEVICES["H100"])
    with use_backend(backend) as manager:
        observers = manager.offloader.observers
        before = repr(observers)
        with Trace(tmp_path / "out.json"):
            assert backend.compute.heard and repr(observers) != before
        streams: Any = (backend.compute, backend.d2h, backend.h2d)
        assert not any(stream.heard for stream in streams)
        assert repr(observers) == before and not observers.copied


def test_the_file_says_what_the_model_does(tmp_path: Path) -> None:
    path = tmp_path / "out.json.gz"
    timeline, found = three_layers(path), read(path)
    assert found.metadata == timeline.metadata and found.base_ns == 0
    for track in ("steps", "compute", "operators", "d2h", "h2d"):
        assert on(found, track) == on(timeline, track) != []
    assert [one.args for one in found.spans] == [one.args for one in timeline.spans]
    assert len(found.flows) == len(timeline.flows) == 2
    assert [len(one.points) for one in found.flows] == [3, 3]
    assert [one.nbytes for one in found.samples] == [one.nbytes for one in timeline.samples]
