"""The engine on a virtual device: as many groups stay as a limit has room for, and its bounds."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from helpers.random_pipelines import planned
from helpers.toy import batches, make_model, run_step
from helpers.virtual_training import (
    FLOPS,
    NUM_LAYERS,
    ROWS,
    SAVED_BYTES,
    WIDTH,
    Layers,
    Steady,
    Training,
    hardware,
    with_limit,
)
from torch import Tensor, nn

from pp_offload import CpuBackend, OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload._groups import auto_bounds
from pp_offload.plan import predict
from pp_offload.simulate import DEVICES, Hardware, VirtualBackend, run_pipeline


@with_limit(40)
def test_the_limit_is_filled_and_kept(training: Training) -> None:
    limit = training.limit_bytes
    first = training.sent_by_a_step()
    peaks = training.run(6)
    sent = training.sent_by_a_step()
    assert 0 < sent < first * 0.75
    moving = 4 * SAVED_BYTES
    assert all(peak <= limit for peak in peaks)
    assert limit - moving - 3 * SAVED_BYTES < peaks[-1]  # another layer of three in flight
    assert peaks[0] < peaks[-1] - 10 * SAVED_BYTES


@with_limit(2)
def test_where_all_that_leaves_is_too_little_one_warning_says_so(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        first = training.sent_by_a_step()
        training.run(6)
    assert training.sent_by_a_step() == pytest.approx(first, rel=0.05)  # but for the margin
    messages = [text for text in caplog.messages if "device_limit_bytes" in text]
    assert len(messages) == 1
    bounds = f"which allow {4 * SAVED_BYTES / 2**20:.1f} MiB in flight"
    advice = f"lower max_in_flight_bytes and prefetch_bytes, {bounds}"
    assert f"all groups leave; {advice}; have more of the model in groups" in messages[0]


@with_limit(40)
def test_states_that_an_optimizer_makes_have_their_room(training: Training) -> None:
    """After the first step, so that one does not say what the second one needs."""
    limit, peaks = training.limit_bytes, [training.step()]
    states = torch.empty(16 * SAVED_BYTES, dtype=torch.uint8, device="meta")
    peaks += training.run(6)
    assert all(peak <= limit for peak in peaks)
    assert peaks[-1] > limit - 8 * SAVED_BYTES
    del states


@with_limit(60)
def test_steps_with_more_microbatches_in_flight_begin_anew(training: Training) -> None:
    """Also the first such step fits."""
    training.run(6)
    few = training.sent_by_a_step()
    assert all(peak <= training.limit_bytes for peak in training.run(4, in_flight=5, num=6))
    assert few < training.sent_by_a_step(in_flight=5, num=6) < NUM_LAYERS * 6 * SAVED_BYTES


@with_limit(60)
def test_a_step_that_teaches_no_plan_leaves_more_room(training: Training) -> None:
    training.run(6)
    peaks = []
    for training.loss_bytes in (20 * SAVED_BYTES, 0) * 4:
        peaks.append(training.step())
        _ = training.loss_bytes and training.forward()  # without a backward
    assert peaks[0] > training.limit_bytes >= peaks[-2]


@with_limit(None)
def test_what_another_process_takes_has_no_room(training: Training) -> None:
    backend = training.backend
    training.run(3)
    assert training.sent_by_a_step() == 0
    weights = NUM_LAYERS * WIDTH**2 * 4
    backend.hardware = replace(backend.hardware, memory_bytes=weights + 40 * SAVED_BYTES)
    training.step()
    assert training.step() <= backend.hardware.memory_bytes
    assert 0 < training.sent_by_a_step()
    backend.hardware = replace(backend.hardware, memory_bytes=10**12)
    training.step()
    assert training.sent_by_a_step() == 0


class Feedforward(nn.Module):
    """What the second group saves can be computed again from what the first one has saved."""

    def __init__(self, num: int) -> None:
        super().__init__()
        kind: Any = {"device": "meta", "dtype": torch.bfloat16, "bias": False}
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH, **kind) for _ in range(num))
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH, **kind) for _ in range(num))

    def forward(self, x: Tensor, *, offload: bool) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            with off_interface(offload, x, "up"):
                y = F.gelu(up(x))
            y = off_interface.group_commit(y, name="up")
            with off_interface(offload, y, "down"):
                x = down(y)
            x = off_interface.group_commit(x, name="down")
        return x


@pytest.mark.parametrize(("num_saved", "resets"), [(40, True), (60, False)])
def test_groups_that_compute_again_from_those_that_leave(num_saved: int, resets: bool) -> None:
    limit = num_saved * SAVED_BYTES + 12 * WIDTH**2 * 8
    training = Training(limit, resets=resets, model=Feedforward(12))
    training.loss_bytes = 9 * SAVED_BYTES  # is in no group, and not there when backward begins
    with training.running():
        first = training.sent_by_a_step()
        assert all(peak <= limit for peak in training.run(6))
        assert 0 < training.sent_by_a_step() < 0.9 * first


class HiddenStates(Layers):
    """The last ``unused`` layers have no loss, the first half perhaps two; outputs may be held."""

    def forward(self, x: Tensor, *, offload: bool = True) -> Tensor:
        states = [x]
        for number, layer in enumerate(self.layers):
            with off_interface(offload, states[-1], f"layer{number % 2}"):
                y = layer(states[-1])
            states.append(off_interface.group_commit(y, name=f"layer{number % 2}"))
        if self.has_auxiliary_loss:
            middle = states[NUM_LAYERS // 2]
            middle.backward(torch.empty_like(middle), retain_graph=True)
        self.held.append(states[-1])
        return states[-1 - self.unused]


@pytest.mark.parametrize("has_auxiliary_loss", [False, True])
@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("unused", [0, 2])
def test_a_loss_need_not_need_the_last_groups(
    unused: int, is_held: bool, has_auxiliary_loss: bool
) -> None:
    model = HiddenStates(NUM_LAYERS, WIDTH)
    model.unused, model.has_auxiliary_loss = unused, has_auxiliary_loss
    model.held = deque(maxlen=12 * is_held)
    training = Training(120 * SAVED_BYTES + NUM_LAYERS * WIDTH**2 * 4, model=model)
    with training.running():
        first = training.sent_by_a_step(num=12)
        assert all(peak <= training.limit_bytes for peak in training.run(6, num=12))
        sent = [training.sent_by_a_step(num=12) for _ in range(3)]
        assert sent[0] == sent[1] == sent[2] < 0.9 * first


# A loop that changes its batch


NUM_SETTLING, NUM_CHANGED = 6, 4
"""Steps at first, and after a change. In the last two of those the time must be the best."""


def loop() -> Training:
    """On a slow link, with room for 30 of the 36 groups in flight of a step of ``ROWS``."""
    limit = 30 * SAVED_BYTES + 12 * WIDTH**2 * 4
    return Training(limit, device=hardware(4.0), model=Layers(12, WIDTH))


def seconds(training: Training, num: int, rows: int) -> list[float]:
    """Times of so many steps, all below the limit."""
    training.rows, times = rows, []
    for _ in range(num):
        begin_s = training.backend.seconds
        assert training.step() <= training.limit_bytes
        training.backend.synchronize()
        times.append(training.backend.seconds - begin_s)
    return times


@cache
def best_s(rows: int) -> float:
    """Time of a settled step of a loop that never had another batch."""
    training = loop()
    with training.running():
        return seconds(training, NUM_SETTLING, rows)[-1]


@pytest.mark.parametrize("sizes", [[ROWS, ROWS // 2], [ROWS * 3 // 2, ROWS]], ids=str)
def test_steps_are_below_the_limit_and_the_best_two_steps_after_a_change(sizes: list[int]) -> None:
    best = [best_s(rows) for rows in sizes]
    training = loop()
    with training.running():
        seconds(training, NUM_SETTLING, ROWS)
        for rows, least_s in zip(sizes, best, strict=True):
            assert max(seconds(training, NUM_CHANGED, rows)[2:]) < least_s * (1 + 1e-6)


# A device without figures


def test_a_device_that_tells_nothing_has_all_groups_leave(caplog: pytest.LogCaptureFixture) -> None:
    config = OffloadConfig(device_limit_bytes=1, min_offloaded_tensor_size=1)
    with use_backend(CpuBackend(), config=config) as manager:
        for _ in range(3):
            run_step(make_model(), batches(3))
        assert manager.statistics().bytes_offloaded > 0
    warnings = [text for text in caplog.messages if "does not report allocated bytes" in text]
    assert len(warnings) == 1


# Pipelines: each rank on its own


@pytest.mark.parametrize(
    "seed",
    [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 5, 7, 9, 11, 12, 20, 22, 35, 51))],
)
def test_no_rank_takes_more_than_the_limit(seed: int, small_floor: None) -> None:
    """Where one step is below it in which all groups leave, and one with the margin."""
    drawn, tapes = planned(seed)
    how = drawn.order, drawn.work, replace(drawn.hardware, memory_bytes=2**40)

    def peak(num_steps: int, **config: Any) -> int:
        options = {"peers": drawn.peers, "num_steps": num_steps, **config}
        step = predict(drawn.order, tapes, drawn.hardware, **options)
        return max(rank.peak_bytes for rank in step.ranks)

    none, least = peak(1), max(peak(num, config=drawn.config) for num in (1, 2))
    for part in (0.0, 0.7, 1.5):
        limit = int(least + (max(none, least) - least) * part)
        config = replace(drawn.config, device_limit_bytes=limit)
        for num_steps in (4, 6):
            step = run_pipeline(*how, config=config, peers=drawn.peers, num_steps=num_steps)
            assert all(rank.peak_bytes <= limit for rank in step.ranks)


# Without a limit: time obeys the law, and memory is spared


def steady(device: Hardware, in_flight: int, window: int = 12, **how: bool) -> Steady:
    """The steady state with so many layers under way in each direction."""
    bounds = {"max_in_flight_bytes": window * SAVED_BYTES, "prefetch_bytes": window * SAVED_BYTES}
    training = Training(None, device=device, **bounds, **how)
    with training.running():
        return training.steady(in_flight)


@pytest.mark.parametrize(("in_flight", "copies", "window"), [(1, 0.8, 4), (3, 2.0, 12)])
def test_a_link_that_is_fast_enough_costs_nothing_and_saves_memory(
    in_flight: int, copies: float, window: int
) -> None:
    """A single microbatch needs its copies in a forward's time; several in turn have a step's."""
    device = hardware(copies)
    none = steady(device, in_flight, offload=False)
    ours = steady(device, in_flight, window)
    assert none.seconds == pytest.approx(NUM_LAYERS * 3 * FLOPS / (990e12 * 0.6), rel=0.05)
    assert ours.seconds / none.seconds < 1.03
    assert ours.peak_bytes < none.peak_bytes


def test_work_of_another_stream_takes_time_beside_the_host() -> None:
    backend = VirtualBackend(DEVICES["H100"])
    assert backend.allocate_host(2**36).nbytes == 2**36, "addresses, and no memory"
    with backend.stream(backend.new_stream("side")):
        backend.current_stream().launch(1.0)
    assert backend.current_stream() is backend.compute
    assert backend.host.now_s < 1.0 < backend.seconds, "though nobody is on that stream any more"
    backend.synchronize()
    assert backend.host.now_s == backend.seconds


# Bounds that are chosen from the times of steps


FEW_LAYERS = 8
CHUNK_BYTES = FEW_LAYERS * SAVED_BYTES
FORWARD_S = FEW_LAYERS * FLOPS / (990e12 * 0.6)


@contextmanager
def training_on(
    device: Hardware, in_flight: int | str = "auto", ahead: int | str = "auto"
) -> Iterator[tuple[Training, Any]]:
    """A training, and what its bounds are now."""
    bounds: dict[str, Any] = {"max_in_flight_bytes": in_flight, "prefetch_bytes": ahead}
    training = Training(None, device=device, model=Layers(FEW_LAYERS, WIDTH), **bounds)
    no_floor = patch.object(auto_bounds, "LEAST_IN_FLIGHT_BYTES", 1)
    with no_floor, training.running() as manager:
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
