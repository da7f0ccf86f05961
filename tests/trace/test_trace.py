"""Steps of real runs: what is recorded, that nothing changes by it, and what fails."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BACKENDS
from helpers.sessions import session
from helpers.threaded import settled
from helpers.toy import AwayBackend, Net, batches, make_model, manager_of, run_step, same_bits, step
from helpers.traces import check_file, raw
from helpers.virtual_training import FLOPS, SAVED_BYTES, WIDTH, Layers, Training, hardware
from torch.profiler import ProfilerActivity, profile

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, use_backend
from pp_offload._memory.budget import reserved_bytes
from pp_offload.backends import CpuBackend
from pp_offload.trace import Timeline, Trace, read


def steps_of(timeline: Timeline | None) -> list[str]:
    assert timeline is not None
    return [span.name for span in timeline.of(0, "steps")]


def train(num_steps: int, width: int = 8, after: Callable[[], object] = lambda: None) -> None:
    """``after`` each forward."""
    model = make_model(width=width)
    model.register_forward_hook(lambda *_: after() and None)
    for number in range(num_steps):
        run_step(model, batches(3, width, number), in_flight=2)


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_trace_changes_no_bit_and_has_what_moved(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json.gz"
    with session(kind, max_in_flight_bytes=1) as manager:  # or late copies are undone
        device = str(manager.backend.device)
        on, off = make_model(device=device), make_model(groups=(), device=device)
        with Trace(path) as trace:
            for number in range(3):
                inputs = [x.to(device) for x in batches(3, step=number)]
                expected = run_step(off, inputs, in_flight=2, offload=False)
                assert same_bits(run_step(on, inputs, in_flight=2), expected)
        statistics = manager.statistics()
    timeline = trace.timeline
    assert timeline is not None and timeline.metadata[0]["device"] == manager.backend.name
    check_file(path, 1)
    assert steps_of(timeline) == ["step 0", "step 1", "step 2"]
    moved = {"d2h": statistics.bytes_offloaded, "h2d": statistics.bytes_reloaded}
    for track, nbytes in moved.items():
        assert sum(span.args["bytes"] for span in timeline.of(0, track)) == nbytes > 0
    groups = [span for span in timeline.of(0, "compute") if not span.name.startswith("waits")]
    names = Counter(span.name for span in groups)
    assert set(names.values()) == {27} and len(names) == 4
    assert sum(s.args["bytes"] for s in groups if "(forward)" in s.name) == moved["d2h"]
    host = [item.nbytes for item in timeline.counter(0, "host")]
    assert max(host) == statistics.host_bytes_peak


@pytest.mark.parametrize(
    ("make", "tiers"), [(CpuBackend, ("host", "disk")), (AwayBackend, ("disk",))]
)
def test_disk_work(
    make: Any, tiers: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without buffers that bytes pass through, each track one after the other."""
    budget = reserved_bytes() + 2**15 if len(tiers) == 2 else None
    options: Any = {"tiers": tiers, "disk_dir": tmp_path, "host_budget_bytes": budget}
    config = OffloadConfig(min_offloaded_tensor_size=1, **options)
    with use_backend(make(), config=config) as manager:
        file = manager.offloader.engine.mover.tier.disk
        begin_s = time.perf_counter()
        monkeypatch.setattr("time.time_ns", lambda: time.sleep(0.02) or 0)  # while second 0 is set
        with Trace(tmp_path / "out.json") as trace:
            train(2, width=64, after=partial(settled, manager))  # else memory may still have it
            assert file.listeners
        assert not file.listeners
        took_s = time.perf_counter() - begin_s
        statistics = manager.statistics()
    check_file(tmp_path / "out.json", 1)
    assert trace.timeline is not None
    spans = [span for span in trace.timeline.spans if span.track.startswith("disk")]
    nbytes = {
        name: sum(s.args["bytes"] for s in spans if s.name == name) for name in "read write".split()
    }
    assert nbytes["read"] == statistics.disk_bytes_read > 0
    assert 0 < nbytes["write"] <= statistics.disk_bytes_written, "what nobody needs is not written"
    step = trace.timeline.of(0, "steps")[0]
    assert all(step.begin_s < span.begin_s < span.end_s < took_s for span in spans)


def test_a_range_of_steps(tmp_path: Path) -> None:
    """The file is there when the last of them is over, and later steps are not in it."""
    path = tmp_path / "out.json"
    with session(CpuBackend()) as manager:
        with Trace(path, steps=range(2, 4)) as trace:
            model = make_model()
            for number in range(6):
                assert path.exists() is (number >= 5), "the reset() of step 4 ends step 3"
                run_step(model, batches(3, step=number))
                assert bool(manager.offloader.observers.copied) is (number in (2, 3))
            written = path.read_bytes()
        assert path.read_bytes() == written
    timeline = read(path)
    assert steps_of(timeline) == steps_of(trace.timeline) == ["step 2", "step 3"]
    names = Counter(span.name for span in timeline.of(0, "compute"))
    assert names["mlp (forward)"] == names["mlp (backward)"] == 2 * 9


def test_an_exception_ends_the_trace_with_what_came_before(tmp_path: Path) -> None:
    with session(CpuBackend()):
        model = make_model()
        with pytest.raises(ZeroDivisionError), Trace(tmp_path / "out.json"):
            run_step(model, batches(2))
            off_interface.reset()
            off_interface.init_chunk_handler(None, None, 1)
            x = torch.ones(4, requires_grad=True)
            with off_interface(True, x, "open"):
                raise ZeroDivisionError
    timeline = read(tmp_path / "out.json")
    check_file(tmp_path / "out.json", 1)
    assert steps_of(timeline) == ["step 0", "step 1"]
    names = Counter(span.name for span in timeline.of(0, "compute"))
    assert names["mlp (forward)"] == names["mlp (backward)"] == 6
    assert not any(name.startswith("open") for name in names), "a group without an end"


def test_configure_in_the_block_is_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``attach`` with a config does so in the block of a trace."""
    with use_backend(CpuBackend(), config=OffloadConfig()) as manager:
        with Trace(tmp_path / "out.json") as trace:
            train(1)
            manager.configure(OffloadConfig(min_offloaded_tensor_size=1))
            train(2)
    assert trace.timeline is not None and trace.timeline.of(0, "d2h")
    assert steps_of(trace.timeline) == ["step 1", "step 2"]
    assert "begins anew" in caplog.text


def test_in_a_capture_nothing_has_a_time(tmp_path: Path) -> None:
    """The device raises if an event of a capture is asked for its time."""
    with manager_of("late") as (manager, device):
        net = Net()
        expected = step(net, is_on=False)
        step(net)
        with Trace(tmp_path / "out.json") as trace:
            assert same_bits(step(net, device), expected)
            assert same_bits(step(net), expected)
    timeline = trace.timeline
    assert timeline is not None and timeline.metadata[0]["has_captures"] is True
    _, second = timeline.of(0, "steps")
    groups = [span for span in timeline.of(0, "compute") if "waits" not in span.name]
    assert groups and all(span.begin_s >= second.begin_s for span in groups)


def test_a_profiler_has_the_same_names(tmp_path: Path) -> None:
    ours, profiled = tmp_path / "ours.json", tmp_path / "profiled.json"
    with session(CpuBackend()) as manager:
        model = make_model()
        run_step(model, batches(2))
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            with Trace(ours):
                run_step(model, batches(2))
            run_step(model, batches(2))  # without a trace there are names, too
        run_step(model, batches(2))
        assert "ProfilerNames" not in repr(manager.offloader.observers)
        profiler.export_chrome_trace(str(profiled))
    spans = [span for span in read(ours).spans if not span.name.startswith(("waits", "step"))]
    names = Counter(
        e["name"] for e in raw(profiled)["traceEvents"] if e.get("cat") == "user_annotation"
    )
    expected = Counter(span.name for span in spans)
    assert {"mlp (forward)", "mlp (backward)", "mlp (offload)", "mlp (reload)"} <= expected.keys()
    assert {name: num for name, num in names.items() if name in expected} == expected + expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 3}, "steps is 3, expected a range"),
        ({"steps": range(0)}, r"steps is range\(0, 0\), expected some steps in a row"),
        ({"path": "/not/there/out.json"}, "expected a file in a folder that is there"),
    ],
)
def test_wrong_arguments_are_explained(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Trace(**{"path": tmp_path / "out.json"} | options)


def test_a_file_that_cannot_be_written_does_not_end_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The error comes at the end of the block, and the timeline is there all the same."""
    folder = tmp_path / "gone"
    folder.mkdir()
    with session(CpuBackend()):
        trace = Trace(folder / "out.json", steps=range(1))
        with pytest.raises(FileNotFoundError), trace:
            folder.rmdir()
            train(3)
    assert steps_of(trace.timeline) == ["step 0"]
    assert "out.json cannot be written: " in caplog.text


# Of a virtual device

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
    bounds = {"max_in_flight_bytes": SAVED_BYTES, "prefetch_bytes": 2**30}
    model = Layers(3, WIDTH)
    training = Training(None, device=device, model=model, is_blocking=True, **bounds)
    with training.running(), Trace(tmp_path / "out.json") as trace:
        training.step(in_flight=1, num=1)
    timeline = trace.timeline
    assert timeline is not None
    assert on(timeline, "d2h") == [("layer (offload)", at, at + 2.5) for at in (1, 3.5, 6)]
    assert on(timeline, "h2d") == [("layer (reload)", 6, 8.5), ("layer (reload)", 8.5, 11)]
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
    works = [(0, 2), (3.5, 4.5), (6, 8), (8.5, 10.5), (11, 13)]
    assert on(timeline, "operators") == [("operators", *work) for work in works]
    assert on(timeline, "steps") == [("step 0", 0, 13)]
    host = [item.nbytes // SAVED_BYTES for item in timeline.counter(0, "host")]
    assert max(host) == 3 and host[0] == 0
    first = timeline.of(0, "compute")[0].args
    place = {"microbatch": 0, "vp_stage": 0, "position": 0}
    assert first == place | {"state": "offloaded", "bytes": SAVED_BYTES}
