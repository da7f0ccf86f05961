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
from pp_offload.trace.copy_notes import Lanes
from pp_offload.trace.notes import Room, Stall
from pp_offload.trace.virtual_notes import OTHER_WORK, VirtualCopyNotes, _Wait

FORWARD_S = FLOPS / (990e12 * 0.6)


def tiny() -> Any:
    """A layer's copy takes two of its forwards, and nothing else takes time."""
    return replace(hardware(2.0), launch_s=0, copy_latency_s=0)


def three_layers(path: Path) -> Timeline:
    """Forward and backward of three layers, on a host that sees every operator end."""
    backend = VirtualBackend(tiny(), is_blocking=True)
    with use_backend(backend, config=OffloadConfig(prefetch_bytes=2**30)):
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
    """Layer 2 is taken back, for its copy has not ended when backward asks for it; layer 1 comes
    back behind its copy, from 5 to 7, so compute waits; layer 0 comes beside the backward of 1.
    """
    timeline = three_layers(tmp_path / "out.json")
    assert {track: on(timeline, track) for track in ("d2h", "h2d")} == {
        "d2h": [("layer (offload)", 1, 3), ("layer (offload)", 3, 5), ("layer (offload)", 5, 7)],
        "h2d": [("layer (reload)", 5, 7), ("layer (reload)", 7, 9)],
    }
    assert on(timeline, "compute") == [
        ("layer (forward)", 0, 1),
        ("layer (forward)", 1, 2),
        ("layer (forward)", 2, 3),
        ("layer (backward)", 3, 5),
        ("layer (backward)", 5, 9),
        ("waits for layer (reload)", 5, 7),
        ("layer (backward)", 9, 11),
    ]
    assert on(timeline, "operators") == [
        ("operators", 0, 5),
        ("operators", 7, 11),
    ]
    assert on(timeline, "steps") == [("step 0", 0, 11)]
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
        [("d2h", 3), ("h2d", 5), ("compute", 7)],
        [("d2h", 1), ("h2d", 7), ("compute", 9)],
    ]


def test_counters_follow_the_bytes(tmp_path: Path) -> None:
    timeline = three_layers(tmp_path / "out.json")
    in_flight = [
        (forwards_at(timeline, one.time_s), one.nbytes // SAVED_BYTES)
        for one in timeline.counter(0, "in flight")
    ]
    # At 3 the first copy ends and the third is queued; then nothing is, so nobody looks again.
    assert in_flight == [(0, 0), (1, 1), (2, 2)]
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
    assert {one.name for one in waits} == {"waits for mix (reload)", "waits for mlp (reload)"}
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
