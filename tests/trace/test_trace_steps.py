"""Which steps are recorded, and what happens when one of them is unlike the others."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import BACKENDS, make_backend
from field_checks import make_inputs
from test_captures import manager_of, pair, step
from test_trace_file import check_schema
from threaded import settled
from toy import AwayBackend, batches, make_model, run_step, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload._core.observer import Lap, Observers
from pp_offload._memory.budget import reserved_bytes
from pp_offload.backends import Backend, CpuBackend
from pp_offload.errors import NotWhileCapturingError, OffloadError
from pp_offload.trace import Timeline, Trace, read

CONFIG = OffloadConfig(min_offloaded_tensor_size=1)


def steps_of(timeline: Timeline | None) -> list[str]:
    assert timeline is not None
    return [one.name for one in timeline.of(0, "steps")]


def num_heard(manager: PipelineOffloadManager) -> int:
    """How many calls its engine's events come to."""
    observers = manager.offloader.observers
    events = [getattr(observers, event.name) for event in fields(Observers)]
    return len(manager.on_begin) + sum(map(len, events))


def train(num_steps: int, width: int = 8, after: Callable[[], object] = lambda: None) -> None:
    """``after`` each forward."""
    model = make_model(width=width)

    def hook(*args: object) -> None:
        after()

    model.register_forward_hook(hook)
    for number in range(num_steps):
        run_step(model, batches(3, width, number), in_flight=2)


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_trace_changes_no_bit_and_says_what_moved(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json.gz"
    config = replace(CONFIG, max_in_flight_bytes=1)  # or late copies are undone, and nothing comes
    with use_backend(make_backend(kind), config=config) as manager:
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
    check_schema(path, 1)
    assert steps_of(timeline) == ["step 0", "step 1", "step 2"]
    for track, nbytes in (
        ("d2h", statistics.bytes_offloaded),
        ("h2d", statistics.bytes_reloaded),
    ):
        assert sum(one.args["bytes"] for one in timeline.of(0, track)) == nbytes > 0
    names = Counter(one.name for one in timeline.of(0, "compute"))
    for group in ("mix", "mlp"):
        assert names[f"{group} (forward)"] == names[f"{group} (backward)"] == 27
    assert all(len(flow.points) == 3 for flow in timeline.flows)
    assert len(timeline.flows) >= len(timeline.of(0, "h2d"))


def test_what_is_used_comes_after_it_came_and_that_after_it_left(tmp_path: Path) -> None:
    """By the host's clock, with threads that copy."""
    with use_backend(CpuBackend(inline_bytes=0), config=CONFIG):
        with Trace(tmp_path / "out.json") as trace:
            train(3, width=64)
    assert trace.timeline is not None and trace.timeline.metadata[0]["clock"] == "host"
    for track in ("d2h", "h2d"):
        spans = trace.timeline.of(0, track)
        both = zip(spans, spans[1:], strict=False)
        assert all(one.end_s <= two.begin_s for one, two in both), "one thread, in order"
    ends = {one.begin_s: one.end_s for t in ("d2h", "h2d") for one in trace.timeline.of(0, t)}
    for flow in trace.timeline.flows:
        left, back, used = flow.points
        assert ends[left.time_s] <= back.time_s and ends[back.time_s] <= used.time_s


@pytest.mark.parametrize(
    ("make", "tiers"),
    [(CpuBackend, ("disk",)), (CpuBackend, ("host", "disk")), (AwayBackend, ("disk",))],
)
def test_what_a_disk_does(make: Any, tiers: tuple[str, ...], tmp_path: Path) -> None:
    """By the host's clock, with and without buffers that bytes pass through."""
    budget = reserved_bytes() + 2**15 if len(tiers) == 2 else None
    config = replace(CONFIG, tiers=tiers, disk_dir=tmp_path, host_budget_bytes=budget)
    with use_backend(make(), config=config) as manager:
        file = manager.offloader.engine.mover.tier.disk
        with Trace(tmp_path / "out.json") as trace:
            train(2, width=64, after=partial(settled, manager))  # else memory may still have it
            assert file.listeners
        assert not file.listeners
        statistics = manager.statistics()
    check_schema(tmp_path / "out.json", 1)
    assert trace.timeline is not None
    spans = [one for one in trace.timeline.spans if one.track.startswith("disk")]
    read_bytes = sum(one.args["bytes"] for one in spans if one.name == "read")
    written = sum(one.args["bytes"] for one in spans if one.name == "write")
    assert read_bytes == statistics.disk_bytes_read > 0
    assert 0 < written <= statistics.disk_bytes_written, "what nobody needs is never written"
    if make is AwayBackend:
        assert any(len(flow.points) == 3 for flow in trace.timeline.flows), "through the disk"


def test_disk_work_at_the_same_time_has_tracks_of_its_own() -> None:
    notes = [DiskNote("write", 1, *span) for span in ((2, 3), (0, 2), (1, 4), (3, 5), (1.5, 3))]
    found = [(track, note.begin_s) for track, note in on_tracks(notes)]
    tracks = ["disk", "disk 2", "disk 3", "disk", "disk"]
    assert found == list(zip(tracks, [0, 1, 1.5, 2, 3], strict=True))


def test_a_range_of_steps(tmp_path: Path) -> None:
    """The file is there when the last of them is over, and what comes later is not in it."""
    path = tmp_path / "out.json"
    with use_backend(CpuBackend(), config=CONFIG) as manager:
        before = num_heard(manager)
        with Trace(path, steps=range(2, 4)) as trace:
            model = make_model()
            for number in range(6):
                assert path.exists() is (number >= 5), "the reset() of step 4 ends step 3"
                run_step(model, batches(3, step=number))
                assert bool(manager.offloader.observers.copied) is (number in (2, 3))
            assert num_heard(manager) == before, "nothing is heard any more"
            written = path.read_bytes()
        assert path.read_bytes() == written
    timeline = read(path)
    assert timeline == trace.timeline
    assert steps_of(timeline) == ["step 2", "step 3"] and timeline.metadata[0]["steps"] == [2, 3]
    names = Counter(one.name for one in timeline.of(0, "compute"))
    assert names["mlp (forward)"] == names["mlp (backward)"] == 2 * 9


def test_steps_that_never_came_leave_an_empty_file_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with use_backend(CpuBackend(), config=CONFIG), Trace(tmp_path / "out.json", steps=range(5, 6)):
        train(2)
    assert read(tmp_path / "out.json").spans == []
    assert "out.json is empty, for nothing ran" in caplog.text


def test_a_full_trace_says_so_once_and_holds_nothing_half(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, most = tmp_path / "out.json", 200
    with use_backend(CpuBackend(), config=CONFIG) as manager:
        on, off = make_model(), make_model(groups=())
        with Trace(path, max_events=most):
            for number in range(4):
                inputs = batches(3, step=number)
                expected = run_step(off, inputs, offload=False)
                assert same_bits(run_step(on, inputs), expected)
            assert not manager.offloader.observers.copied, "nothing is timed now"
    kinds = check_schema(path, 1)
    num = sum(num for kind, num in kinds.items() if kind != "M")
    assert most / 3 < num <= most
    timeline = read(path)
    assert timeline.metadata[0]["is_truncated"] is True
    assert timeline.metadata[0]["max_events"] == most
    assert caplog.text.count("a trace has its 200 events") == 1
    assert timeline.of(0, "steps") == [], "the first step is cut, so nobody knows when it ended"
    assert timeline.of(0, "compute") and timeline.of(0, "d2h")


def test_one_that_is_not_full_does_not_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with use_backend(CpuBackend(), config=CONFIG), Trace(tmp_path / "out.json") as trace:
        train(2)
    assert trace.timeline is not None and trace.timeline.metadata[0]["is_truncated"] is False
    assert "events" not in caplog.text


def test_what_came_before_an_exception_is_written(tmp_path: Path) -> None:
    with use_backend(CpuBackend(), config=CONFIG):
        model = make_model()
        with pytest.raises(ZeroDivisionError), Trace(tmp_path / "out.json", steps=range(0, 9)):
            run_step(model, batches(2))
            off_interface.reset()
            off_interface.init_chunk_handler(None, None, 1)
            model(batches(1)[0].requires_grad_())
            raise ZeroDivisionError
    timeline = read(tmp_path / "out.json")
    check_schema(tmp_path / "out.json", 1)
    assert steps_of(timeline) == ["step 0", "step 1"]
    names = Counter(one.name for one in timeline.of(0, "compute"))
    assert names["mlp (forward)"] == 9 and names["mlp (backward)"] == 6


def test_a_group_that_never_ends_is_left_out(tmp_path: Path) -> None:
    with use_backend(CpuBackend(), config=CONFIG), Trace(tmp_path / "out.json") as trace:
        off_interface.reset()
        off_interface.init_chunk_handler(None, None, 1)
        x = torch.ones(4, requires_grad=True)
        for name in ("begun", "whole"):
            with off_interface(True, x, name) as x:
                x = x.exp()
        off_interface.group_commit(x, name="whole")
    assert trace.timeline is not None
    assert [one.name for one in trace.timeline.of(0, "compute")] == ["whole (forward)"]


def test_of_two_managers_each_has_its_own(tmp_path: Path) -> None:
    with use_backend(CpuBackend(), config=CONFIG) as first:
        with Trace(tmp_path / "first.json", manager=first) as one:
            train(1)
            with use_backend(CpuBackend(), config=CONFIG) as second:
                with Trace(tmp_path / "second.json", manager=second) as two:
                    train(3)
            train(1)
    assert steps_of(one.timeline) == ["step 0", "step 1"]
    assert steps_of(two.timeline) == ["step 0", "step 1", "step 2"]


def test_two_traces_of_one_manager(tmp_path: Path) -> None:
    with use_backend(CpuBackend(), config=CONFIG):
        with Trace(tmp_path / "all.json") as all_steps:
            with Trace(tmp_path / "one.json", steps=range(1, 2)) as one:
                train(3)
    assert steps_of(all_steps.timeline) == ["step 0", "step 1", "step 2"]
    assert steps_of(one.timeline) == ["step 1"]
    assert all_steps.timeline and one.timeline
    assert len(all_steps.timeline.of(0, "d2h")) > len(one.timeline.of(0, "d2h")) > 0


@pytest.mark.parametrize("is_in_a_step", [False, True])
def test_configure_in_the_block_is_followed(
    is_in_a_step: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As ``attach`` with a config does, in the block of a trace."""
    with use_backend(CpuBackend(), config=OffloadConfig()) as manager:
        with Trace(tmp_path / "out.json") as trace:
            if is_in_a_step:
                train(1)
            manager.configure(CONFIG)
            train(2)
    assert trace.timeline is not None and trace.timeline.of(0, "d2h")
    assert steps_of(trace.timeline) == (
        ["step 1", "step 2"] if is_in_a_step else ["step 0", "step 1"]
    )
    assert trace.timeline.metadata[0]["began_anew"] is is_in_a_step
    assert ("begins anew" in caplog.text) is is_in_a_step


def test_in_a_capture_no_event_is_asked_for_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device raises if one is; and what is captured has no time, so it is not there."""
    with manager_of("late") as (manager, device):
        on, off = pair()
        inputs = make_inputs(2)
        expected = step(off, inputs)
        step(on, inputs)
        asked = []
        timed = type(manager.backend).timed_event

        def noting(backend: Any, stream: Any) -> Any:
            asked.append(backend.is_capturing)
            return timed(backend, stream)

        monkeypatch.setattr(type(manager.backend), "timed_event", noting)
        with Trace(tmp_path / "out.json") as trace:
            assert same_bits(step(on, inputs, device), expected)
            assert same_bits(step(on, inputs), expected)
        assert asked and not any(asked)
    timeline = trace.timeline
    assert timeline is not None and timeline.metadata[0]["has_captures"] is True
    first, second = timeline.of(0, "steps")
    groups = [one for one in timeline.of(0, "compute") if "waits" not in one.name]
    assert groups and all(one.begin_s >= second.begin_s for one in groups)
    check_schema(tmp_path / "out.json", 1)


def test_a_trace_cannot_end_in_a_capture(tmp_path: Path) -> None:
    with manager_of("late") as (manager, device):
        before = num_heard(manager)
        trace = Trace(tmp_path / "out.json")
        trace.__enter__()
        step(pair()[0], make_inputs(1))
        with device.capture():
            with pytest.raises(NotWhileCapturingError, match="after the capture"):
                trace.__exit__(None, None, None)
        assert num_heard(manager) == before
        assert not (tmp_path / "out.json").exists()


def test_what_is_taken_back_is_no_use_of_what_came() -> None:
    """As where a reload was given up, and its source is there when autograd asks."""
    at = CpuBackend().d2h.record_event()
    begin: Any = at
    notes = CopyNotes(begin, Room(9), Lanes(CpuBackend()))
    reloads = [SimpleNamespace(event=event) for event in (None, at)]
    batch: Any = SimpleNamespace(label="mlp", back=SimpleNamespace(reloads=reloads))
    for to_host in (True, False):
        notes.copied(Lap(begin, begin, 4), [(batch, [0, 1])], at, to_host=to_host)
    saved: list[Any] = [SimpleNamespace(batch=batch, index=index) for index in range(2)]
    assert notes.first_use_of(saved[0]) is None
    assert notes.first_use_of(saved[1]) is notes.copies[1]
    assert notes.copies[1].came_from == (notes.copies[0],)


def test_threads_have_tracks_of_their_own(tmp_path: Path) -> None:
    """Each with its forward; with one reset() for all of them."""
    with use_backend(CpuBackend(), config=CONFIG) as manager:
        models = [make_model() for _ in range(3)]
        with Trace(tmp_path / "out.json") as trace:
            off_interface.reset()
            together = threading.Barrier(3)

            def work(number: int) -> None:
                manager.begin_chunk(None, None, 1, microbatch=number)
                x = batches(1, step=number)[0].requires_grad_()
                together.wait()
                y = models[number](x)
                y.square().mean().backward()

            threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert trace.timeline is not None
    check_schema(tmp_path / "out.json", 1)
    tracks = {one.track for one in trace.timeline.spans} - {"d2h", "h2d", "steps"}
    assert tracks == {"compute 2", "compute 3", "compute 4"}, "the first is the main thread's"
    for track in tracks:
        names = Counter(one.name for one in trace.timeline.of(0, track))
        for group in ("mix", "mlp"):  # also the last one, which ends with the step
            assert names[f"{group} (forward)"] == names[f"{group} (backward)"] == 3


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"steps": 3}, TypeError, "steps is 3, expected a range"),
        ({"steps": range(0)}, ValueError, r"steps is range\(0, 0\), expected some steps in a row"),
        ({"steps": range(0, 9, 2)}, ValueError, "expected some steps in a row"),
        ({"steps": range(-1, 3)}, ValueError, "expected some steps in a row"),
        ({"max_events": 0}, ValueError, "max_events is 0"),
        ({"path": "/not/there/out.json"}, ValueError, "expected a file in a folder that is there"),
        ({"path": "/"}, ValueError, "path is /, expected a file"),
        ({"path": None}, TypeError, "path is None, expected a path"),
    ],
)
def test_wrong_arguments_are_explained(
    arguments: dict[str, Any], kind: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=said):
        Trace(**{"path": tmp_path / "out.json"} | arguments)


def test_a_trace_is_entered_once_at_a_time(tmp_path: Path) -> None:
    with use_backend(CpuBackend(), config=CONFIG) as manager:
        trace = Trace(tmp_path / "out.json")
        for _ in range(2):  # one after the other is fine
            with trace:
                with pytest.raises(OffloadError, match="records already"), trace:
                    pass
                train(1)
            assert steps_of(trace.timeline) == ["step 0"]
        assert not manager.on_begin


def test_a_disk_that_is_full_does_not_end_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with use_backend(CpuBackend(), config=CONFIG):
        trace = Trace(folder / "out.json", steps=range(1))
        with pytest.raises(FileNotFoundError), trace:
            folder.rmdir()
            train(3)
            assert "cannot be written now, training goes on" in caplog.text
        assert steps_of(trace.timeline) == ["step 0"], "it is there all the same"
        with Trace(tmp_path / "gone.json"):
            train(1)


def test_a_full_disk_does_not_hide_what_went_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with use_backend(CpuBackend(), config=CONFIG):
        with pytest.raises(ZeroDivisionError), Trace(folder / "out.json") as trace:
            folder.rmdir()
            train(1)
            raise ZeroDivisionError
    assert "out.json cannot be written" in caplog.text
    assert steps_of(trace.timeline) == ["step 0"]


def test_an_empty_trace_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with use_backend(CpuBackend(), config=CONFIG):
        with Trace(tmp_path / "out.json", steps=range(7, 8)):
            train(1)
        assert "is empty, for nothing ran" in caplog.text
        caplog.clear()
        with Trace(tmp_path / "out.json", max_events=1):
            train(1)
        assert "ask for fewer steps, or for more events" in caplog.text
        assert "nothing ran" not in caplog.text


class Failing(CpuBackend):
    """A device that copies nothing."""

    def copy(self, *arguments: Any) -> None:
        raise OSError("the copy failed")


def test_a_copy_that_fails_leaves_no_span(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend: Backend = Failing()
    with use_backend(backend, config=CONFIG):
        with pytest.raises(OSError, match="the copy failed"), Trace(tmp_path / "out.json") as trace:
            train(1)
    assert trace.timeline is not None
    assert not trace.timeline.of(0, "d2h")
    check_schema(tmp_path / "out.json", 1)


def test_the_manager_of_the_process_is_traced_by_default(tmp_path: Path) -> None:
    manager = PipelineOffloadManager.get_instance()
    manager.configure(CONFIG)
    with Trace(tmp_path / "out.json") as trace:
        train(1)
    assert steps_of(trace.timeline) == ["step 0"]


def test_without_a_trace_nothing_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one function of it, nor a timed event."""
    called: Counter[str] = Counter()

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and "/pp_offload/trace/" in frame.f_code.co_filename:
            called[frame.f_code.co_name] += 1
        if event == "call" and frame.f_code.co_name == "timed_by_host":
            called[frame.f_code.co_name] += 1

    with use_backend(CpuBackend(), config=CONFIG):
        train(1)
        sys.setprofile(watch)
        try:
            train(2)
        finally:
            sys.setprofile(None)
    assert not called
