"""Bounds that are chosen from the times of steps, on a device with a clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from helpers import virtual_training
from helpers.virtual_layers import FLOPS, SAVED_BYTES, hardware

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, use_backend
from pp_offload._groups import auto_bounds
from pp_offload._groups.manager import Manager
from pp_offload.simulate import VirtualBackend
from pp_offload.simulate.clocks import VirtualEvent

NUM_LAYERS, IN_FLIGHT = 8, 4
CHUNK_BYTES = NUM_LAYERS * SAVED_BYTES


class Training(virtual_training.Training):
    """Steps whose steady state is timed."""

    def __init__(self, manager: Manager) -> None:
        assert isinstance(manager.backend, VirtualBackend)
        super().__init__("auto", num_layers=NUM_LAYERS)
        self.manager, self.backend = manager, manager.backend

    def timed_step(self, rounds: int = 6) -> tuple[float, int]:
        """Seconds that compute was stalled in a round of the steady state, and the peak there."""
        off_interface.reset()
        compute, memory = self.backend.compute, self.backend.memory
        for number in self.turns(IN_FLIGHT, IN_FLIGHT - 1 + rounds):
            if number == IN_FLIGHT:
                begin_s = compute.stalled_s
                memory.take_peak()
            elif number == IN_FLIGHT - 2 + rounds:
                stalled_s, peak = (compute.stalled_s - begin_s) / (rounds - 2), memory.peak_bytes
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
    device = hardware(copies)
    with use_backend(VirtualBackend(device), config=ALL_LEAVE) as manager:
        training = Training(manager)
        training.timed_step()
        for _ in range(2):
            stalled_s, peak = training.timed_step()
        cap, window = training.bounds()
    assert stalled_s < 0.01 * 3 * FORWARD_S
    assert cap + window < 2 * CHUNK_BYTES
    for less in [(cap - SAVED_BYTES, window), (cap, window - 2 * SAVED_BYTES)]:
        if min(less) < SAVED_BYTES:
            continue
        config = OffloadConfig(
            device_limit_bytes=None, max_in_flight_bytes=less[0], prefetch_bytes=less[1]
        )
        with use_backend(VirtualBackend(device), config=config) as manager:
            training = Training(manager)
            training.timed_step()
            stalled_s, _ = training.timed_step()
        assert stalled_s > 0.01 * 3 * FORWARD_S, less


def test_a_link_that_is_too_slow_is_never_idle() -> None:
    device = hardware(4.0)
    with use_backend(VirtualBackend(device), config=ALL_LEAVE) as manager:
        training = Training(manager)
        for _ in range(3):
            stalled_s, _ = training.timed_step()
        cap, window = training.bounds()
    law_s = CHUNK_BYTES / device.link_bytes_per_s - 3 * FORWARD_S
    assert stalled_s <= 1.1 * law_s
    assert max(cap, window) <= CHUNK_BYTES, "a link that is behind is no reason to keep everything"


@pytest.fixture
def training() -> Iterator[Training]:
    with use_backend(VirtualBackend(hardware(1.5)), config=ALL_LEAVE) as manager:
        yield Training(manager)


def test_bounds_do_not_grow_beyond_the_device() -> None:
    """A step that fits is followed by steps that fit."""
    device = hardware(2.9)
    with use_backend(VirtualBackend(device), config=ALL_LEAVE) as manager:
        training = Training(manager)
        peaks = [training.timed_step()[1] for _ in range(3)]
        free = sum(training.bounds())
    assert peaks[2] > peaks[0]
    memory_bytes = (peaks[0] + peaks[2]) // 2
    with use_backend(
        VirtualBackend(replace(device, memory_bytes=memory_bytes)), config=ALL_LEAVE
    ) as manager:
        training = Training(manager)
        for _ in range(4):
            training.timed_step()
            assert training.backend.memory.peak_bytes <= memory_bytes
        assert sum(training.bounds()) < free


def test_the_statistics_say_what_compute_waited(training: Training) -> None:
    assert training.manager.statistics().stalled_ms is None
    before_s = training.backend.compute.stalled_s
    training.timed_step()
    stalled_s = training.backend.compute.stalled_s - before_s
    off_interface.reset()
    stalled_ms = training.manager.statistics().stalled_ms
    assert stalled_ms is not None and stalled_s > 0
    assert stalled_ms / 1e3 == pytest.approx(stalled_s, rel=0.05)


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
        training.timed_step()
    assert training.bounds() == (before[0], 2 * SAVED_BYTES)
    # Once under no plan, and under the plan of that step as often as steps are timed.
    assert num_tries == 1 + auto_bounds.NUM_TIMED, "it tries for ever"
