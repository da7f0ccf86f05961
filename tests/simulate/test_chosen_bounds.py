"""Bounds that are chosen from the times of steps, on a device with a clock."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_backend
from test_device import FLOPS, ROWS, SAVED_BYTES, WIDTH, Layers, hardware
from torch import Tensor
from toy import batches, make_model, run_step

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, use_backend
from pp_offload._core.bound import IN_FLIGHT_BYTES
from pp_offload._core.observer import Observers
from pp_offload._core.stopwatch import Laps, timed_copy, timed_wait
from pp_offload._groups import auto_bounds
from pp_offload._groups.manager import Manager
from pp_offload.simulate import DEVICES, VirtualBackend
from pp_offload.simulate.clocks import VirtualEvent, VirtualStream

NUM_LAYERS, IN_FLIGHT = 8, 4
CHUNK_BYTES = NUM_LAYERS * SAVED_BYTES


class Training:
    """Steps of microbatches in turn, as on a stage of 1F1B."""

    def __init__(self, manager: Manager, num_layers: int = NUM_LAYERS) -> None:
        assert isinstance(manager.backend, VirtualBackend)
        self.manager = manager
        self.backend = manager.backend
        self.model = Layers(num_layers, WIDTH)
        self.rows = ROWS

    def forward(self) -> Tensor:
        off_interface.init_chunk_handler(None, None, 1)
        x = torch.empty(self.rows, WIDTH, device="meta", dtype=torch.bfloat16, requires_grad=True)
        return self.model(x, offload=True)  # type: ignore[no-any-return]

    def step(self, rounds: int = 6) -> tuple[float, int]:
        """Seconds that compute was stalled in a round of the steady state, and the peak there."""
        off_interface.reset()
        stalled_s, waiting = 0.0, deque(self.forward() for _ in range(IN_FLIGHT - 1))
        for number in range(rounds):
            if number == 2:
                stalled_s = self.backend.compute.stalled_s
                self.backend.memory.take_peak()
            waiting.append(self.forward())
            y = waiting.popleft()
            y.backward(torch.empty_like(y))
            del y
        stalled_s = (self.backend.compute.stalled_s - stalled_s) / (rounds - 2)
        peak = self.backend.memory.peak_bytes
        while waiting:
            y = waiting.popleft()
            y.backward(torch.empty_like(y))
            del y
        self.backend.synchronize()
        return stalled_s, peak

    def bounds(self) -> tuple[int, int]:
        return self.manager.bounds.now


@pytest.fixture(autouse=True)
def least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers here are small, so that tests are fast."""
    monkeypatch.setattr(auto_bounds, "LEAST_IN_FLIGHT_BYTES", 1)


ALL_LEAVE = OffloadConfig(device_limit_bytes=None)
FORWARD_S = NUM_LAYERS * FLOPS / (990e12 * 0.6)


@pytest.mark.parametrize("copies", [0.5, 1.5, 2.5])
def test_nothing_stalls_and_less_memory_would(copies: float) -> None:
    """``copies`` take so many times a forward; they have three times that."""
    one = hardware(copies)
    with use_backend(VirtualBackend(one), config=ALL_LEAVE) as manager:
        training = Training(manager)
        training.step()
        for _ in range(2):
            stalled_s, peak = training.step()
        cap, window = training.bounds()
    assert stalled_s < 0.01 * 3 * FORWARD_S
    assert cap + window < 2 * CHUNK_BYTES
    for less in [(cap - SAVED_BYTES, window), (cap, window - 2 * SAVED_BYTES)]:
        if min(less) < SAVED_BYTES:
            continue
        config = OffloadConfig(
            device_limit_bytes=None, max_in_flight_bytes=less[0], prefetch_bytes=less[1]
        )
        with use_backend(VirtualBackend(one), config=config) as manager:
            training = Training(manager)
            training.step()
            stalled_s, _ = training.step()
        assert stalled_s > 0.01 * 3 * FORWARD_S, less


def test_a_link_that_is_too_slow_is_never_idle() -> None:
    one = hardware(4.0)
    with use_backend(VirtualBackend(one), config=ALL_LEAVE) as manager:
        training = Training(manager)
        for _ in range(3):
            stalled_s, _ = training.step()
        cap, window = training.bounds()
    law_s = CHUNK_BYTES / one.link_bytes_per_s - 3 * FORWARD_S
    assert stalled_s <= 1.1 * law_s
    assert max(cap, window) <= CHUNK_BYTES, "a link that is behind is no reason to keep everything"


@pytest.fixture
def training() -> Iterator[Training]:
    with use_backend(VirtualBackend(hardware(1.5)), config=ALL_LEAVE) as manager:
        yield Training(manager)


def test_what_was_chosen_is_said_once_with_numbers(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for _ in range(6):
        training.step()
    *_, line = [text for text in caplog.messages if "compute waited" in text]
    cap, window = training.bounds()
    assert f"at most {cap >> 20} MiB wait" in line and f"run {window >> 20} MiB ahead" in line


def test_only_the_first_steps_are_timed(training: Training) -> None:
    made = 0
    timed_event = VirtualBackend.timed_event

    def counted(backend: VirtualBackend, stream: Any) -> VirtualEvent:
        nonlocal made
        made += 1
        return timed_event(backend, stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VirtualBackend, "timed_event", counted)
        counts = []
        for _ in range(5):
            training.step()
            counts.append(made)
    assert 0 < counts[0] < counts[1] == counts[4]
    assert not training.manager.offloader.observers.reached


def test_the_times_are_read_when_they_are_known(training: Training) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VirtualBackend, "synchronize", lambda backend: None)
        off_interface.reset()
        y = training.forward()
        training.backend.host.wait_until(training.backend.seconds)  # so that something comes back
        y.backward(torch.empty_like(y))
        del y
        before = training.bounds()
        off_interface.reset()
        off_interface.reset()
        assert training.bounds() == before, "chosen before the device was done"
    training.backend.synchronize()
    off_interface.reset()
    assert training.bounds() != before


def test_a_step_without_backward_tells_nothing(training: Training) -> None:
    before = training.bounds()
    off_interface.reset()
    y = training.forward()
    training.backend.synchronize()
    off_interface.reset()
    del y
    off_interface.reset()
    cap, window = training.bounds()
    assert cap == before[0] and window >= before[1]
    for _ in range(2):
        training.step()
    off_interface.reset()
    assert training.bounds()[0] != before[0]


def test_another_step_is_timed_again(training: Training) -> None:
    for _ in range(4):
        training.step()
    before = training.bounds()
    training.model = Layers(2 * NUM_LAYERS, WIDTH)
    for _ in range(4):
        stalled_s, _ = training.step()
    after = training.bounds()
    assert after[0] > before[0] and after[1] > before[1]
    assert stalled_s < 0.01 * 6 * FORWARD_S


def test_bounds_do_not_grow_beyond_the_device() -> None:
    """A step that fits is followed by steps that fit."""
    one = hardware(2.9)
    with use_backend(VirtualBackend(one), config=ALL_LEAVE) as manager:
        training = Training(manager)
        peaks = [training.step()[1] for _ in range(3)]
        free = sum(training.bounds())
    assert peaks[2] > peaks[0]
    memory_bytes = (peaks[0] + peaks[2]) // 2
    with use_backend(
        VirtualBackend(replace(one, memory_bytes=memory_bytes)), config=ALL_LEAVE
    ) as manager:
        training = Training(manager)
        for _ in range(4):
            training.step()
            assert training.backend.memory.peak_bytes <= memory_bytes
        assert sum(training.bounds()) < free


def test_no_less_is_in_flight_than_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards in a row need it, and it is little."""
    monkeypatch.setattr(auto_bounds, "LEAST_IN_FLIGHT_BYTES", IN_FLIGHT_BYTES)
    with use_backend(VirtualBackend(hardware(0.5)), config=ALL_LEAVE) as manager:
        training = Training(manager, num_layers=2)
        for _ in range(3):
            training.step()
        cap, window = training.bounds()
    assert cap == IN_FLIGHT_BYTES and window < IN_FLIGHT_BYTES


def test_with_numbers_for_both_nothing_is_chosen() -> None:
    config = OffloadConfig(device_limit_bytes=None, max_in_flight_bytes=12345, prefetch_bytes=0)
    with use_backend(VirtualBackend(hardware(1.0)), config=config) as manager:
        training = Training(manager)
        for _ in range(3):
            training.step()
        assert training.bounds() == (12345, 0)
        assert manager.statistics().stalled_ms


def test_the_statistics_say_what_compute_waited(training: Training) -> None:
    assert training.manager.statistics().stalled_ms is None
    before_s = training.backend.compute.stalled_s
    training.step()
    stalled_s = training.backend.compute.stalled_s - before_s
    off_interface.reset()
    stalled_ms = training.manager.statistics().stalled_ms
    assert stalled_ms is not None and stalled_s > 0
    assert stalled_ms / 1e3 == pytest.approx(stalled_s, rel=0.05)


def test_events_that_do_not_know_their_time_change_nothing(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_time(event: VirtualEvent, end: VirtualEvent) -> float:
        raise RuntimeError("elapsed_time is not supported")

    monkeypatch.setattr(VirtualEvent, "elapsed_time", no_time)
    before = training.bounds()
    for _ in range(3):
        training.step()
    assert training.bounds() == (before[0], 2 * SAVED_BYTES)


@pytest.mark.parametrize("kind", ["late", "eager", "random", "cpu"])
def test_without_a_clock_the_bounds_follow_the_groups(kind: str) -> None:
    backend = make_backend(kind)
    with use_backend(
        backend, config=OffloadConfig(device_limit_bytes=None, min_offloaded_tensor_size=1)
    ) as manager:
        model = make_model(width=64)
        for step in range(3):
            run_step(model, batches(3, 64, step), in_flight=2)
        assert manager.offloader.engine.mover.in_flight.bound.nbytes == IN_FLIGHT_BYTES
        assert manager.statistics().stalled_ms is None


class Bench:
    """An engine's stopwatch by itself."""

    def __init__(self) -> None:
        self.backend = VirtualBackend(replace(DEVICES["H100"], launch_s=0))
        self.observers = Observers()
        self._host, self._device = [torch.empty(4)], [torch.empty(4, device="meta")]

    def start(self) -> Laps | None:
        laps = Laps.started(self.backend)
        if laps is not None:
            self.observers.add(laps)
        return laps

    def copy(self, stream: VirtualStream, label: str) -> Any:
        moved: Any = [(SimpleNamespace(label=label), [0])]
        both = self._host, self._device
        targets, sources = both if stream is self.backend.d2h else both[::-1]
        record = stream.record_event
        return timed_copy(self.observers, self.backend, stream, record, targets, sources, moved)

    def wait(self, event: Any) -> None:
        timed_wait(self.observers, self.backend, self.backend.compute.wait_event, event)


def test_a_stopwatch_times_nothing_in_a_capture() -> None:
    bench = Bench()
    backend = bench.backend
    backend.is_capturing = True
    assert bench.start() is None
    backend.is_capturing = False
    laps = bench.start()
    assert laps is not None
    backend.is_capturing = True
    bench.wait(bench.copy(backend.d2h, "captured"))
    assert laps.now(backend) is None
    assert laps.is_cut and not laps.offloads and not laps.waits
    bench.observers.remove(laps)
    backend.is_capturing = False
    laps = bench.start()
    assert laps is not None
    bench.copy(backend.h2d, "later")
    assert not laps.is_cut and not laps.offloads and len(laps.reloads) == 1


def test_two_time_at_once_and_neither_cuts_the_other() -> None:
    bench = Bench()
    backend = bench.backend
    first = bench.start()
    bench.copy(backend.d2h, "first alone")
    second = bench.start()
    assert first is not None and second is not None
    bench.wait(bench.copy(backend.h2d, "both"))
    assert first.now(backend) is first.end is not second.end
    bench.observers.remove(first)
    bench.copy(backend.d2h, "second alone")
    bench.observers.remove(second)
    bench.copy(backend.d2h, "nobody")
    assert first.reloads == second.reloads and len(first.reloads) == len(first.waits) == 1
    assert len(first.offloads) == len(second.offloads) == 1 and first.offloads != second.offloads


def test_more_bytes_under_the_same_plan_are_timed_again(training: Training) -> None:
    """As where sequences become longer."""
    for _ in range(4):
        training.step()
    before = training.bounds()
    training.rows = 2 * ROWS
    for _ in range(4):
        stalled_s, _ = training.step()
    after = training.bounds()
    assert after[0] >= 1.5 * before[0]
    assert stalled_s < 0.01 * 6 * FORWARD_S


def test_a_device_that_makes_no_timed_events_goes_on(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tries = 0

    def no_event(backend: VirtualBackend, stream: Any) -> VirtualEvent:
        nonlocal num_tries
        num_tries += 1
        raise RuntimeError("enable_timing is not supported")

    monkeypatch.setattr(VirtualBackend, "timed_event", no_event)
    before = training.bounds()
    for _ in range(6):
        training.step()
    assert training.bounds() == (before[0], 2 * SAVED_BYTES)
    # Once under no plan, and under the plan of that step as often as steps are timed.
    assert num_tries == 1 + auto_bounds.NUM_TIMED, "it tries for ever"


def test_nothing_is_asked_in_a_capture(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    training.step()
    bounds = training.manager.bounds
    bounds.end_step(bounds._plan, is_complete=True)  # so that there are times to choose by
    assert bounds._timed is not None
    monkeypatch.setattr(training.backend, "is_capturing", True)
    monkeypatch.setattr(VirtualEvent, "query", lambda event: pytest.fail("asked in a capture"))
    before = training.bounds()
    bounds.begin_step()
    assert training.bounds() == before
