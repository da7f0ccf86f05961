"""Bounds that are chosen from the times of steps, on a device with a clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from helpers.virtual_training import FLOPS, SAVED_BYTES, WIDTH, Layers, Training, hardware

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager
from pp_offload._groups import auto_bounds
from pp_offload.simulate import Hardware, VirtualBackend

NUM_LAYERS = 8
CHUNK_BYTES = NUM_LAYERS * SAVED_BYTES
FORWARD_S = NUM_LAYERS * FLOPS / (990e12 * 0.6)

pytestmark = pytest.mark.usefixtures("small_floor")


@contextmanager
def training_on(
    device: Hardware, in_flight: int | str = "auto", ahead: int | str = "auto"
) -> Iterator[tuple[Training, Any]]:
    """A training, and what its bounds are now."""
    bounds: dict[str, Any] = {"max_in_flight_bytes": in_flight, "prefetch_bytes": ahead}
    training = Training(None, device=device, model=Layers(NUM_LAYERS, WIDTH), **bounds)
    with training.running() as manager:
        yield training, lambda: manager.bounds.now  # type: ignore[attr-defined]


@pytest.mark.parametrize("copies", [0.5, 1.5, 2.5])
def test_nothing_stalls_and_less_memory_would(copies: float) -> None:
    """``copies`` take so many times a forward; they have three times that."""
    with training_on(hardware(copies)) as (training, bounds):
        *_, steady = [training.steady() for _ in range(3)]
        cap, window = bounds()
    assert steady.stalled_s < 0.01 * 3 * FORWARD_S
    assert cap + window < 2 * CHUNK_BYTES
    for less in [(cap - SAVED_BYTES, window), (cap, window - 2 * SAVED_BYTES)]:
        if min(less) >= SAVED_BYTES:
            with training_on(hardware(copies), *less) as (training, _):
                *_, steady = [training.steady() for _ in range(2)]
            assert steady.stalled_s > 0.01 * 3 * FORWARD_S, less


def test_a_link_that_is_too_slow_is_never_idle() -> None:
    device = hardware(4.0)
    with training_on(device) as (training, bounds):
        *_, steady = [training.steady() for _ in range(3)]
        assert steady.stalled_s <= 1.1 * (CHUNK_BYTES / device.link_bytes_per_s - 3 * FORWARD_S)
        assert max(bounds()) <= CHUNK_BYTES, "a link that is behind is no reason to keep everything"


def test_bounds_do_not_grow_beyond_the_device() -> None:
    """A step that fits is followed by steps that fit."""
    device = hardware(2.9)
    with training_on(device) as (training, bounds):
        peaks = [training.steady().peak_bytes for _ in range(3)]
        free = sum(bounds())
    assert peaks[2] > peaks[0]
    memory_bytes = (peaks[0] + peaks[2]) // 2
    with training_on(replace(device, memory_bytes=memory_bytes)) as (training, bounds):
        for _ in range(4):
            training.steady()
            assert training.backend.memory.peak_bytes <= memory_bytes
        assert sum(bounds()) < free


def test_the_statistics_say_what_compute_waited() -> None:
    with training_on(hardware(1.5)) as (training, _):
        manager = PipelineOffloadManager.get_instance()
        assert manager.statistics().stalled_ms is None
        training.steady()
        stalled_s = training.backend.compute.stalled_s
        off_interface.reset()
        stalled_ms = manager.statistics().stalled_ms
        assert stalled_ms is not None and stalled_s > 0
        assert stalled_ms / 1e3 == pytest.approx(stalled_s, rel=0.05)


def test_a_device_that_makes_no_timed_events_goes_on() -> None:
    refusal = RuntimeError("enable_timing is not supported")
    with (
        patch.object(VirtualBackend, "timed_event", side_effect=refusal) as tried,
        training_on(hardware(1.5)) as (training, bounds),
    ):
        before = bounds()
        for _ in range(6):
            training.steady()
        assert bounds() == (before[0], 2 * SAVED_BYTES)
    # Once under no plan, and under the plan of that step as often as steps are timed.
    assert tried.call_count == 1 + auto_bounds.NUM_TIMED, "it tries for ever"
