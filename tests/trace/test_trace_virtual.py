"""A trace of a virtual run has what the streams of the device did, to the last bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.schedules import order
from helpers.traces import check_file
from helpers.virtual_layers import FLOPS, ROWS, SAVED_BYTES, WIDTH, Layers, hardware
from helpers.virtual_models import chain
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, use_backend
from pp_offload.simulate import DEVICES, Modules, PeerLink, VirtualBackend, run_pipeline
from pp_offload.trace import Timeline, Trace
from pp_offload.trace.figures import WAITS_FOR_COPIES, Kind, rank_steps

FORWARD_S = FLOPS / (990e12 * 0.6)


def on(timeline: Timeline, track: str) -> list[tuple[str, float, float]]:
    """Names and times of spans, in forwards of a layer since the begin of the step."""
    zero_s = timeline.of(0, "steps")[0].begin_s
    return [
        (span.name, *(round((at - zero_s) / FORWARD_S, 9) for at in (span.begin_s, span.end_s)))
        for span in timeline.of(0, track)
    ]


def test_three_layers_take_what_a_hand_computes(tmp_path: Path) -> None:
    """Forward and backward of three layers, on a host that waits for every operator. A copy takes
    2.5 forwards of a layer, nothing else takes time, and one layer may be in flight.

    Compute waits for a copy before another group may leave. Layer 2 is taken back, because its copy
    has not ended when backward asks for it; the others come back, each a bit late.
    """
    device = replace(hardware(2.5), launch_s=0, copy_latency_s=0)
    backend = VirtualBackend(device, is_blocking=True)
    config = OffloadConfig(max_in_flight_bytes=SAVED_BYTES, prefetch_bytes=2**30)
    with use_backend(backend, config=config):
        model = Layers(3, WIDTH)
        with Trace(tmp_path / "out.json") as trace:
            off_interface.reset()
            off_interface.init_chunk_handler(None, None, 1)
            x = torch.empty(ROWS, WIDTH, device="meta", dtype=torch.bfloat16, requires_grad=True)
            y = model(x, offload=True)
            y.backward(torch.empty_like(y))
    three_layers = trace.timeline
    assert three_layers is not None
    offloads = [
        ("layer (offload)", 1, 3.5),
        ("layer (offload)", 3.5, 6),
        ("layer (offload)", 6, 8.5),
    ]
    assert on(three_layers, "d2h") == offloads
    assert on(three_layers, "h2d") == [("layer (reload)", 6, 8.5), ("layer (reload)", 8.5, 11)]
    assert on(three_layers, "compute") == [
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
    works = [(0, 2), (3.5, 4.5), (6, 8), (8.5, 10.5), (11, 13)]
    assert on(three_layers, "operators") == [("operators", *work) for work in works]
    assert on(three_layers, "steps") == [("step 0", 0, 13)]
    host = [item.nbytes // SAVED_BYTES for item in three_layers.counter(0, "host")]
    assert max(host) == 3 and host[0] == 0
    first = three_layers.of(0, "compute")[0].args
    place = {"microbatch": 0, "vp_stage": 0, "position": 0}
    assert first == place | {"state": "offloaded", "bytes": SAVED_BYTES}


def modules() -> Modules:
    return chain(
        4,
        lambda: [nn.Sequential(nn.Linear(1024, 1024), nn.Sigmoid()).to("meta") for _ in range(3)],
        torch.empty(2048, 1024, device="meta"),
    )


def test_figures_of_four_virtual_ranks_are_those_of_the_run(tmp_path: Path) -> None:
    out = tmp_path / "out.json.gz"
    config = OffloadConfig(min_offloaded_tensor_size=1, max_in_flight_bytes=2**23)
    slow = replace(DEVICES["H100"], link_bytes_per_s=2e10)
    trace = Trace(out, steps=range(1, 2))
    how: dict[str, Any] = {"config": config, "peers": PeerLink(latency_s=2e-4)}
    made = order(Schedule1F1B, 4, 4, 6)
    step = run_pipeline(made, modules(), slow, trace=trace, **how)
    assert step == run_pipeline(made, modules(), slow, **how), "a trace changes nothing"
    timeline = trace.timeline
    assert timeline is not None and timeline.ranks == [0, 1, 2, 3] and timeline.base_ns == 0
    kinds = check_file(out, 4)
    assert kinds["X"] == len(timeline.spans)
    begins = {timeline.of(rank, "steps")[0].begin_s for rank in timeline.ranks}
    assert len(begins) == 1, "all ranks begin a step at the same time"
    totals = Counter[str]()
    for traced, rank in zip(rank_steps(timeline, 1).values(), step.ranks, strict=True):
        others_s = sum(rank.waited_s.values())
        assert traced.seconds_of(Kind.OPERATORS) == pytest.approx(rank.busy_s, rel=1e-9)
        stalled_s = traced.seconds_of(*WAITS_FOR_COPIES)
        assert stalled_s == pytest.approx(rank.stalled_s, rel=1e-9, abs=1e-12)
        waited_s = traced.waited_s[Kind.WAITS_FOR_RANK]
        assert waited_s == pytest.approx(others_s, rel=1e-9, abs=1e-12)
        assert traced.end_s - traced.begin_s == pytest.approx(rank.seconds, rel=1e-9)
        rate = pytest.approx(rank.bytes_offloaded / rank.offload_s, rel=1e-9)
        assert traced.copied(Kind.OFFLOAD) == (rank.bytes_offloaded, rate)
        assert traced.peak_bytes["device"] == rank.peak_bytes
        totals["stalled"] += stalled_s > 0
        totals["others"] += waited_s > 0
    assert totals["stalled"] and totals["others"]
